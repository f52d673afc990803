#include <ATen/ATen.h>

#include "api/find_param.hpp"
#include "param/residency.hpp"

namespace fsdp {

at::Tensor plain_view(const at::Tensor& registered) {
  BelowResidency below;
  auto view = registered.detach();
  remove_residency_key(view);
  return view;
}

}  // namespace fsdp
