#include "trace/group_channels.hpp"

#include <utility>

namespace fsdp {

void GroupChannels::note(Operation operation, const GroupIdentity& group, Communicator& comm) {
  const auto id = static_cast<size_t>(group.id);
  if (id >= channels_.size()) [[unlikely]]
    channels_.resize(id + 1);
  auto& channel = channels_[id][static_cast<size_t>(operation)];
  if (channel.comm != &comm) [[unlikely]]
    channel = {&comm, place_of(comm)};
}

GroupChannels::Entry GroupChannels::enter(Operation operation, const GroupIdentity& group) const {
  const auto id = static_cast<size_t>(group.id);
  if (id >= channels_.size()) return {};
  const auto& [comm, place] = channels_[id][static_cast<size_t>(operation)];
  if (!place) return {};
  auto conflict = place->threads().enter({names_of(operation).plain, group.name});
  if (conflict) [[unlikely]]
    return {nullptr, std::move(conflict), comm};
  return {place, std::nullopt, comm};
}

}  // namespace fsdp
