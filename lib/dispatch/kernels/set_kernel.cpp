#include <ATen/ops/set_ops.h>

#include "dispatch/kernels/unboxed_kernel.hpp"
#include "dispatch/param_storage.hpp"

// `set_` of a member: InputArchive::read calls it.
namespace fsdp {

namespace {

/// The unsharded parameter itself, whose storage is its group's: the source's values are written to it.
bool is_unsharded_param(const at::Tensor& tensor) {
  const auto* impl = tensor.unsafeGetTensorImpl();
  const auto* storage = ParamStorage::of(impl);
  if (storage == nullptr || storage->kind() != ParamStorage::Kind::kUnsharded) return false;
  return storage->owner()->unsharded_param(storage->index()).unsafeGetTensorImpl() == impl;
}

struct SetKernel {
  using Op = at::_ops::set__source_Tensor;
  static at::Tensor& call(c10::DispatchKeySet keys, at::Tensor& self, const at::Tensor& source) {
    if (!is_unsharded_param(self))
      return call_residency_fallback<Op, at::Tensor&, at::Tensor&, const at::Tensor&>(keys, self, source);
    self.set_data(source);
    return self;
  }
};

TORCH_LIBRARY_IMPL(aten, DeferredInit, library) { add_residency_kernel<SetKernel::Op, SetKernel>(library); }

}  // namespace

}  // namespace fsdp
