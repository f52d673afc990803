#pragma once

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/watch/group_place.hpp"
#include "fsdp/communicator.hpp"
#include "trace/collective_log.hpp"
#include "trace/group_identity.hpp"

namespace fsdp {

/// The communicators that groups launch on, each for one thread at a time. Not thread-safe.
class GroupChannels {
 public:
  /// The group is about to launch the operation there.
  void note(Operation operation, const GroupIdentity& group, Communicator& comm);

  struct Entry {
    std::shared_ptr<GroupPlace> place = nullptr;    ///< to be left; null: nothing was entered
    std::optional<std::string> conflict = {};  ///< another thread is there
    Communicator* comm = nullptr;                ///< which that is
  };
  /// This thread goes into the communicator that the operation was launched on last, to launch or to wait.
  Entry enter(Operation operation, const GroupIdentity& group) const;

 private:
  struct Channel {
    Communicator* comm = nullptr;                 // alive while the group launches or waits there
    std::shared_ptr<GroupPlace> place = nullptr;  // null: none is kept for it
  };
  std::vector<std::array<Channel, 3>> channels_;  // by group and operation
};

}  // namespace fsdp
