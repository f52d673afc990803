#include <ATen/ATen.h>

#include "api/params/find_param.hpp"
#include "dispatch/residency.hpp"

namespace fsdp {

at::Tensor plain_view(const at::Tensor& sharded_param) {
  BelowResidency below;
  auto view = sharded_param.detach();
  remove_residency_key(view);
  // A write to the view is one to the parameter, and has to be seen as one.
  view.unsafeGetTensorImpl()->set_version_counter(
      sharded_param.unsafeGetTensorImpl()->version_counter());
  return view;
}

}  // namespace fsdp
