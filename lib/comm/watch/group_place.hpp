#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/watch/awaited_log.hpp"
#include "comm/watch/one_thread.hpp"
#include "fsdp/communicator.hpp"

namespace fsdp {

/// Which of the groups of one world a communicator is, and what is kept for it, for all objects that stand for it.
class GroupPlace {
 public:
  explicit GroupPlace(std::string path = "") : path_(std::move(path)) {}

  /// Tells by what names and in which order the group was split from the world: other groups have other paths. It is the same
  /// on all ranks of the group, and on the ranks of groups that were made beside it, such as the rows of a mesh. "" for the
  /// world itself.
  const std::string& path() const { return path_; }

  /// Returns the place of the group of these ranks that is split off now. Called by its members alone, not thread-safe, as
  /// `split` is.
  std::shared_ptr<GroupPlace> below(const std::string& name, const std::vector<int>& world_ranks);

  OneThread& threads() { return threads_; }
  AwaitedLog& awaited() { return awaited_; }

 private:
  const std::string path_;
  std::map<std::pair<std::string, std::vector<int>>, int> made_;  // how often: groups of one name may have other ranks
  OneThread threads_;
  AwaitedLog awaited_;
};

/// Fails the group on which `threads().enter` has found `conflict`, and whatever of this rank uses it, on all ranks. Throws
/// ScheduleError, which says so.
[[noreturn]] void refuse_two_threads(Communicator& group, const std::string& conflict);

/// Returns the communicator's place; null where it reaches no board of a world (notice_board.hpp).
std::shared_ptr<GroupPlace> place_of(Communicator& group);

}  // namespace fsdp
