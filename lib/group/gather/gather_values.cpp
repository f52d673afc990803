#include "group/gather/gather_values.hpp"

#include <ATen/ATen.h>

#include "comm/watch/awaited_collectives.hpp"
#include "dispatch/residency.hpp"
#include "group/param_group.hpp"
#include "tensor/shard_part.hpp"

namespace fsdp {

namespace {

/// Ranges of one length that lie one distance apart: one block of a matrix.
struct Run {
  int64_t begin, count, stride, repeats;
  at::Tensor of(const at::Tensor& flat) const {
    return flat.as_strided({repeats, count}, {stride, 1}, flat.storage_offset() + begin);
  }
};

/// Shard(d) gives each rank one run, a flat layout a range.
std::vector<Run> runs_of(const std::vector<ElementRange>& ranges) {
  std::vector<Run> runs;
  for (const auto& range : ranges) {
    if (!runs.empty()) {
      auto& last = runs.back();
      const bool fits = range.count() == last.count && range.begin > last.begin &&
                        (last.repeats == 1 || range.begin == last.begin + last.repeats * last.stride);
      if (fits) {
        last.stride = last.repeats == 1 ? range.begin - last.begin : last.stride;
        ++last.repeats;
        continue;
      }
    }
    runs.push_back({range.begin, range.count(), range.count(), 1});
  }
  return runs;
}

int64_t total(const std::vector<ElementRange>& ranges) {
  int64_t count = 0;
  for (const auto& range : ranges) count += range.count();
  return count;
}

/// True if rank r's elements are those from r * padded on: then the gathered buffer is the tensor.
bool follow_each_other(const std::vector<std::vector<ElementRange>>& parts, int64_t padded) {
  for (size_t rank = 0; rank < parts.size(); ++rank) {
    const auto& ranges = parts[rank];
    if (ranges.size() > 1) return false;
    if (!ranges.empty() && ranges[0].begin != static_cast<int64_t>(rank) * padded) return false;
  }
  return true;
}

at::Tensor assemble(const at::Tensor& gathered, const std::vector<std::vector<ElementRange>>& parts,
                    int64_t padded, int64_t numel) {
  if (follow_each_other(parts, padded)) return gathered.narrow(0, 0, numel);
  auto flat = at::empty({numel}, gathered.options());
  for (size_t rank = 0; rank < parts.size(); ++rank) {
    int64_t position = static_cast<int64_t>(rank) * padded;
    for (const auto& run : runs_of(parts[rank])) {
      const int64_t count = run.repeats * run.count;
      run.of(flat).copy_(gathered.narrow(0, position, count).view({run.repeats, run.count}));
      position += count;
    }
  }
  return flat;
}

/// A flat part of one rank, all elements in the order of memory, as the parameter.
at::Tensor in_memory(const at::Tensor& flat, const FSDPParam& param) {
  return flat.as_strided(param.spec.sizes(), param.spec.strides(), flat.storage_offset());
}

}  // namespace

at::Tensor gather_values(const ParamGroup& group, size_t index, const at::Tensor& local) {
  BelowResidency below;
  const auto& info = group.identity().mesh_info;
  const auto& param = group.params()[index];
  const auto options = at::TensorOptions().dtype(local.scalar_type()).device(info.mesh.device());
  const int ranks = info.shard_size();
  if (ranks == 1) {
    // A flat part lies in the order of memory, whatever the parameter's strides are.
    const auto whole = param.layout().is_flat() ? in_memory(local.contiguous(), param)
                                                : local.reshape(param.spec.sizes());
    return at::empty_strided(param.spec.sizes(), param.spec.strides(), options).copy_(whole);
  }
  std::vector<std::vector<ElementRange>> parts;
  int64_t padded = 0, numel = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    parts.push_back(element_ranges(param.layout(), rank));
    padded = std::max(padded, total(parts.back()));
    numel += total(parts.back());
  }
  auto gathered = at::empty({ranks * padded}, options);
  if (padded > 0) {
    const auto own = gathered.narrow(0, info.shard_rank() * padded, padded);
    own.narrow(0, 0, local.numel()).copy_(local.reshape({-1}));
    own.narrow(0, local.numel(), padded - local.numel()).zero_();
    awaited::all_gather(*info.shard_group, gathered, own, param.name());
  }
  const auto whole = assemble(gathered, parts, padded, numel).view(param.spec.sizes());
  // Without padding or a rearrangement the buffer is what is wanted.
  const bool is_done = whole.storage().nbytes() == whole.nbytes() &&
                       whole.strides() == c10::IntArrayRef(param.spec.strides());
  return is_done ? whole : at::empty_strided(param.spec.sizes(), param.spec.strides(), options).copy_(whole);
}

}  // namespace fsdp
