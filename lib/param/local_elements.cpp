#include "param/local_elements.hpp"

#include <ATen/ATen.h>

namespace fsdp {

at::Tensor local_elements(const ShardedParam& param, int shard_rank, const at::Tensor& whole) {
  const auto sizes = param.layout().local_sizes(shard_rank);
  const auto elements = whole.reshape({-1});
  std::vector<at::Tensor> parts;
  for (const auto& range : param.layout().element_ranges(shard_rank))
    parts.push_back(elements.narrow(0, range.begin, range.count()));
  if (parts.empty()) return at::empty(sizes, whole.options());
  return (parts.size() == 1 ? parts[0] : at::cat(parts)).view(sizes);
}

}  // namespace fsdp
