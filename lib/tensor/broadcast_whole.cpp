#include "tensor/broadcast_whole.hpp"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "comm/watch/awaited_collectives.hpp"

namespace fsdp {

bool is_first_rank(const DeviceMesh& mesh) {
  if (!mesh.defined()) return true;
  const auto& coordinates = mesh.get_coordinate();
  return std::all_of(coordinates.begin(), coordinates.end(), [](int64_t c) { return c == 0; });
}

void broadcast_from_first(const at::Tensor& tensor, const DeviceMesh& mesh, const std::string& subject) {
  if (tensor.numel() == 0) return;
  // First every column takes its row 0, then every row its column 0.
  for (int dim = 0; dim < mesh.ndim(); ++dim)
    if (mesh.size(dim) > 1) awaited::broadcast(*mesh.get_group(dim), tensor, 0, subject);
}

at::Tensor broadcast_whole(const at::Tensor& tensor, const DeviceMesh& mesh) {
  const at::Tensor whole = tensor.clone(at::MemoryFormat::Contiguous);
  if (!whole.is_meta())
    broadcast_from_first(whole, mesh, fmt::format("distribute_tensor ({})", fmt::join(tensor.sizes(), ", ")));
  return whole;
}

}  // namespace fsdp
