#include "group/group_spec.hpp"

#include "param/param_rows.hpp"

namespace fsdp {

LayoutParam layout_param(const GroupParam& param) {
  const auto& unsharded_param = param.unsharded_param;
  const auto dtype = param.dtype();
  // Runs of one kind: their dtypes agree, also when they are converted, and what needs no gradient is not
  // reduced with the others.
  const auto dtypes = static_cast<int64_t>(dtype) * 256 + static_cast<int64_t>(param.param_dtype);
  return {.sizes = unsharded_param.sizes().vec(),
          .strides = kept_strides(unsharded_param),
          .stored_itemsize = static_cast<int64_t>(c10::elementSize(dtype)),
          .gathered_itemsize = static_cast<int64_t>(c10::elementSize(param.param_dtype)),
          .dim = param.dim,
          .block_numel = param.block_numel,
          .run_key = 4 * dtypes + 2 * param.has_param_dtype + !unsharded_param.requires_grad()};
}

}  // namespace fsdp
