#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/communicator.hpp"

/// What every backend asks of its arguments, said once. All throw UsageError with nothing started.
namespace fsdp::checks {

/// What both tensors of a pair, and the pairs of a batch, must be.
enum class Devices { kAny, kGroups };

void all_gather(const Communicator& comm, const at::Tensor& output, const at::Tensor& input,
                std::string_view subject, Devices devices = Devices::kGroups);
void reduce_scatter(const Communicator& comm, const at::Tensor& output, const at::Tensor& input,
                    std::string_view subject, Devices devices = Devices::kGroups);
void all_reduce(const Communicator& comm, const at::Tensor& tensor, std::string_view subject,
                Devices devices = Devices::kGroups);
void broadcast(const Communicator& comm, const at::Tensor& tensor, int root,
               std::string_view subject, Devices devices = Devices::kGroups);
void all_gather_batch(const Communicator& comm, std::span<const at::Tensor> outputs,
                      std::span<const at::Tensor> inputs, std::string_view subject,
                      Devices devices = Devices::kGroups);
void reduce_scatter_batch(const Communicator& comm, std::span<const at::Tensor> outputs,
                          std::span<const at::Tensor> inputs, std::string_view subject,
                          Devices devices = Devices::kGroups);

}  // namespace fsdp::checks

namespace fsdp {

/// What `split` made of its arguments.
struct SplitPlan {
  std::string name;              ///< "shard[0,1]": the name with the world ranks behind it
  std::vector<int> world_ranks;  ///< of the members, in the new order
  int rank = -1;                 ///< this rank in the new group; -1: not a member
};

/// Throws UsageError for an empty, repeated or unknown rank.
SplitPlan plan_split(const Communicator& parent, std::span<const int> ranks,
                     const std::string& name);

}  // namespace fsdp
