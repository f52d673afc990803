#include "comm/c10d/c10d_arguments.hpp"

#include <c10/core/ScalarType.h>

#include "comm/threads/local_reduce.hpp"

namespace fsdp {

c10d::ReduceOp c10d_op(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return c10d::ReduceOp::SUM;
    case ReduceOp::kMax:
      return c10d::ReduceOp::MAX;
    case ReduceOp::kMin:
      return c10d::ReduceOp::MIN;
  }
  return c10d::ReduceOp::SUM;
}

at::Tensor as_sent(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
    case at::kHalf:
    case at::kBFloat16:
    case at::kDouble:
    case at::kByte:
    case at::kChar:
    case at::kInt:
    case at::kLong:
      return tensor;
    default:
      return piece_of(tensor, 0, 1).view(at::kByte);
  }
}

std::vector<at::Tensor> as_sent(std::span<const at::Tensor> tensors) {
  std::vector<at::Tensor> sent;
  sent.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) sent.push_back(as_sent(tensor));
  return sent;
}

}  // namespace fsdp
