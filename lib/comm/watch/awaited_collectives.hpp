#pragma once

#include <string_view>

#include "fsdp/communicator.hpp"

// Collectives that the host waits for at once, outside of any group of parameters: what one rank may call alone by mistake.
// Each names its operation and `subject`, which is the user's call where one is known, to the other ranks: who does not come is
// named in the log after a while, and in the error.
//
// They take what Communicator's take. Throw CommError; ScheduleError where the ranks are known to disagree.
namespace fsdp::awaited {

void all_gather(Communicator& group, const at::Tensor& output, const at::Tensor& input, std::string_view subject);
void reduce_scatter(Communicator& group, const at::Tensor& output, const at::Tensor& input, ReduceOp op,
                    std::string_view subject);
void all_reduce(Communicator& group, const at::Tensor& tensor, ReduceOp op, std::string_view subject);
void broadcast(Communicator& group, const at::Tensor& tensor, int root, std::string_view subject);

}  // namespace fsdp::awaited
