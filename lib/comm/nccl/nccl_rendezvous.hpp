// Only in builds with CUDA.
#pragma once

#include <string>

#include "comm/nccl/nccl_group_config.hpp"
#include "comm/nccl/nccl_link.hpp"

namespace fsdp {

/// Says in the group's store that this rank has come to connect that channel, and returns what NCCL connects it by: the
/// same on all ranks. Waits for all of them, as NCCL's own wait for a rank that does not come has no end.
ncclUniqueId exchange_id(const NcclGroupConfig& group, const std::string& channel, const Patience& patience);

/// Ranks that have not come to connect that channel: "1, 3".
std::string missing_ranks(const NcclGroupConfig& group, const std::string& channel);

/// Why another rank has left the group; empty: none has, or whoever served the notes is gone.
std::string why_others_left(const NcclGroupConfig& group);
/// Does not throw: the others run into their timeout then.
void tell_why_left(const NcclGroupConfig& group, const std::string& reason);

}  // namespace fsdp
