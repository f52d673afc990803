#include "param/param_rows.hpp"

#include <ATen/ATen.h>

#include "dispatch/residency.hpp"
#include "tensor/shard_part.hpp"
#include "tensor/strides.hpp"

namespace fsdp {

std::vector<int64_t> kept_strides(const at::Tensor& unsharded_param) {
  return is_dense(unsharded_param.sizes(), unsharded_param.strides()) ? unsharded_param.strides().vec()
                                                                      : row_major_strides(unsharded_param.sizes());
}

at::Tensor rows_in(const ParamSpec& spec, const at::Tensor& piece) {
  const auto values = piece.narrow(0, 0, spec.local_bytes()).view(spec.dtype);
  return values.as_strided(spec.local_sizes, spec.local_strides, values.storage_offset());
}

void copy_rows(const ParamSpec& spec, const at::Tensor& whole, const at::Tensor& piece) {
  BelowResidency below;
  const int64_t bytes = spec.local_bytes();
  if (bytes < piece.numel()) piece.narrow(0, bytes, piece.numel() - bytes).zero_();
  if (bytes > 0) rows_in(spec, piece).copy_(part_of(spec.layout, whole, spec.rank));
}

at::Tensor own_memory(const ParamSpec& spec, const at::Tensor& unsharded_param, c10::Device device) {
  if (spec.layout.world_size() != 1 || spec.is_cast()) return {};
  if (unsharded_param.device() != device || unsharded_param.is_meta()) return {};
  if (!is_dense(unsharded_param.sizes(), unsharded_param.strides())) return {};
  BelowResidency below;
  auto bytes = at::empty({0}, unsharded_param.options().dtype(at::kByte).requires_grad(false));
  auto* impl = bytes.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(unsharded_param.storage());
  impl->set_storage_offset(unsharded_param.storage_offset() * spec.itemsize());
  impl->set_sizes_contiguous({spec.local_bytes()});
  return bytes;
}

void cast_rows(const ParamSpec& spec, const at::Tensor& piece, const at::Tensor& gathered) {
  if (spec.is_cast())
    gathered.view(spec.param_dtype).copy_(piece.view(spec.dtype));
  else
    gathered.copy_(piece);
}

void write_rows_back(const ParamSpec& spec, const at::Tensor& unsharded, const at::Tensor& piece, const at::Tensor& shown) {
  if (spec.local_bytes() == 0) return;
  const auto elements = unsharded.view(spec.param_dtype);
  const auto whole = elements.as_strided(spec.sizes(), spec.strides(), elements.storage_offset());
  const auto kept = rows_in(spec, piece);
  const auto written = part_of(spec.layout, whole, spec.rank).to(kept.device());
  if (!spec.is_cast() && !shown.defined()) {
    kept.copy_(written);
    return;
  }
  // An operator may have written a few elements: the others keep the bits that the cast dropped.
  const auto before = shown.defined() ? shown.as_strided(spec.local_sizes, spec.local_strides) : kept.to(spec.param_dtype);
  const auto is_same = before.eq(written).logical_or_(before.isnan().logical_and_(written.isnan()));
  kept.copy_(at::where(is_same, kept, written.to(spec.dtype)));
}

}  // namespace fsdp
