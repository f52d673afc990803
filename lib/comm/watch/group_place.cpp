#include "comm/watch/group_place.hpp"

#include <fmt/format.h>

#include "comm/notice_board.hpp"
#include "comm/watch/rank_watch.hpp"
#include "fsdp/schedule_check_options.hpp"

namespace fsdp {

std::shared_ptr<GroupPlace> GroupPlace::below(const std::string& name, const std::vector<int>& world_ranks) {
  // The ranks may be a part of the name, and those of a row beside this one are others.
  const auto plain = name.substr(0, name.find('['));
  const int before = made_[{plain, world_ranks}]++;
  return std::make_shared<GroupPlace>(fmt::format("{}/{}#{}", path_, plain, before));
}

std::shared_ptr<GroupPlace> place_of(Communicator& group) {
  auto* owner = dynamic_cast<HasNoticeBoard*>(&group);
  return owner != nullptr ? owner->place() : nullptr;
}

void refuse_two_threads(Communicator& group, const std::string& conflict) {
  const int own = group.ranks()[static_cast<size_t>(group.rank())];
  const auto text = fmt::format(
      "two threads of rank {} use communicator '{}' at once: {}. The ranks cannot tell which collectives belong together. Use "
      "it "
      "from one thread, or give the model of each thread a mesh over a communicator of its own (Communicator::split; in Python "
      "a "
      "process group)",
      own, group.name(), conflict);
  const auto board = notice_board_of(group);
  const auto place = place_of(group);
  if (board && place) board->rank_watch(own)->refuse(*place, text);
  group.abort(text);
  throw ScheduleError(text);
}

}  // namespace fsdp
