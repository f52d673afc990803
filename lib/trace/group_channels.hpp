#pragma once

#include <array>
#include <memory>
#include <vector>

#include "comm/watch/group_place.hpp"
#include "fsdp/communicator.hpp"
#include "trace/collective_log.hpp"
#include "trace/group_identity.hpp"

namespace fsdp {

/// Knows on which communicator a group has launched an operation last: that is where it waits, too. Not thread-safe.
class GroupChannels {
 public:
  struct Channel {
    Communicator* comm = nullptr;                 ///< alive while the group launches or waits there
    std::shared_ptr<GroupPlace> place = nullptr;  ///< null: none is kept for it
  };

  /// Notes that the group is about to launch the operation on `comm`.
  const Channel& launches(Operation operation, const GroupIdentity& group, Communicator& comm) {
    const auto id = static_cast<size_t>(group.id);
    if (id >= channels_.size()) [[unlikely]]
      channels_.resize(id + 1);
    auto& channel = channels_[id][static_cast<size_t>(operation)];
    if (channel.comm != &comm) [[unlikely]]
      channel = {&comm, place_of(comm)};
    return channel;
  }
  /// Returns where the group has launched the operation; null: it has launched nothing yet.
  const Channel* of(Operation operation, const GroupIdentity& group) const {
    const auto id = static_cast<size_t>(group.id);
    return id < channels_.size() ? &channels_[id][static_cast<size_t>(operation)] : nullptr;
  }

 private:
  std::vector<std::array<Channel, 3>> channels_;  // by group and operation
};

}  // namespace fsdp
