#include "tensor/broadcast_whole.hpp"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

namespace fsdp {

at::Tensor broadcast_whole(const at::Tensor& tensor, const DeviceMesh& mesh) {
  const std::string subject = fmt::format("distribute_tensor ({})", fmt::join(tensor.sizes(), ", "));
  const at::Tensor whole = tensor.clone(at::MemoryFormat::Contiguous);
  if (whole.numel() == 0 || whole.is_meta()) return whole;
  // First every column takes its row 0, then every row its column 0.
  for (int m = 0; m < mesh.ndim(); ++m)
    if (mesh.size(m) > 1) mesh.group(m)->start_broadcast(whole, 0, subject)->wait();
  return whole;
}

}  // namespace fsdp
