#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "comm/failure_flag.hpp"
#include "comm/watch/group_place.hpp"
#include "fsdp/communicator.hpp"
#include "trace/desync/verdict/verdict.hpp"

namespace fsdp {

/// Holds the verdict that the ranks disagree, once this rank knows it, and the communicators that are failed with it, which
/// wakes whoever waits in them.
///
/// add: one thread. The others: any thread.
class DesyncVerdict {
 public:
  bool is_given() const { return failure_.is_set(); }
  /// Returns what the ranks disagree about. To be called only where it is given.
  const Verdict& get() const { return given_; }

  /// Adds a communicator that is to be failed with it. Known ones are passed over.
  void add(Communicator& group);
  /// True if one of the communicators is that group's.
  bool uses(const GroupPlace& group) const;
  /// Gives the verdict, and fails the communicators with it. The first verdict stays.
  void give(const Verdict& verdict);

 private:
  struct Group {
    const Communicator* identity;  // only compared
    std::weak_ptr<Communicator> alive;
  };

  FailureFlag failure_;
  Verdict given_;              // before failure_ is set, and never changed after that
  mutable std::mutex mutex_;   // of given_ and of the groups, which the thread that adds reads without it
  std::vector<Group> groups_;
};

}  // namespace fsdp
