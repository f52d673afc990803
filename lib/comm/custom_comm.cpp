#include "fsdp/custom_comm.hpp"

#include <ATen/ops/empty.h>

namespace fsdp {

at::Tensor Comm::allocate(int64_t numel, const at::TensorOptions& options) {
  return at::empty({numel}, options);
}

std::shared_ptr<Work> AllGatherComm::start_all_gather(const at::Tensor& output, const at::Tensor& input,
                                                      Communicator& group, std::string_view subject) {
  return group.start_all_gather(output, input, subject);
}

std::shared_ptr<Work> ReduceScatterComm::start_reduce_scatter(const at::Tensor& output,
                                                              const at::Tensor& input, ReduceOp op,
                                                              Communicator& group, std::string_view subject) {
  return group.start_reduce_scatter(output, input, op, subject);
}

}  // namespace fsdp
