#include "shown/set_data.hpp"

#include "root/autograd/set_data.hpp"
#include "root/find_param.hpp"
#include "shown/shown_param.hpp"
#include "shown/shown_registry.hpp"

namespace fsdp::python {

namespace {

bool set_shown_data(const at::Tensor& tensor, const at::Tensor& data) {
  const InterpreterLock lock;
  if (const auto unsharded = find_param(tensor)) {
    const auto shown = shown_registry().find(unsharded->param().local_tensor());
    if (shown) shown->set_data(data);
    return shown != nullptr;
  }
  const auto params = shown_registry().all_by_dtensor();
  if (const auto found = params.find(tensor.unsafeGetTensorImpl()); found != params.end()) {
    found->second->set_data(data);
    return true;
  }
  const auto gradient = ShownGradient::of(tensor);
  if (gradient) gradient->set_data(data);
  return gradient != nullptr;
}

}  // namespace

void take_over_set_data() { set_data_of_kind_is_done_by(&set_shown_data); }

}  // namespace fsdp::python
