#include <ATen/ATen.h>

#include "api/params/find_param.hpp"
#include "api/params/own_rows.hpp"
#include "dispatch/residency.hpp"
#include "dtensor/dtensor_impl.hpp"

namespace fsdp {

at::Tensor plain_view(const at::Tensor& parameter) {
  BelowResidency below;
  const auto* dtensor = DTensorImpl::of(parameter);
  const auto& local_tensor = dtensor != nullptr ? dtensor->local() : parameter;
  auto view = local_tensor.detach();
  remove_residency_key(view);
  // A write to the view is one to the parameter, and has to be seen as one.
  view.unsafeGetTensorImpl()->set_version_counter(
      local_tensor.unsafeGetTensorImpl()->version_counter());
  return view;
}

at::Tensor own_state(const FoundParam& found, const at::Tensor& state) {
  if (!state.defined()) return state;
  const auto* dtensor = DTensorImpl::of(state);
  const auto& spec = found.param().spec;
  if (dtensor != nullptr) {
    const bool is_alike = dtensor->has_piece() && spec.dtensor && dtensor->spec().is_placed_as(*spec.dtensor);
    return is_alike ? dtensor->local() : own_of_whole(found, dtensor->whole("optimizer state"));
  }
  const bool is_whole = spec.dtensor && state.sizes() == c10::IntArrayRef(spec.dtensor->sizes());
  return is_whole ? own_of_whole(found, state) : state;
}

at::Tensor state_of(const FoundParam& found, at::Tensor local) {
  const auto& dtensor = found.param().spec.dtensor;
  return dtensor ? make_dtensor(std::move(local), dtensor, WholeStorage::Message::kFull) : local;
}

}  // namespace fsdp
