#include "group/reduce/gradient_store.hpp"

#include <ATen/ATen.h>

#include <algorithm>

#include "base/log.hpp"
#include "base/plain_values.hpp"
#include "base/require.hpp"
#include "base/side_stream.hpp"
#include "dispatch/host_error.hpp"
#include "dispatch/residency.hpp"
#include "dtensor/dtensor_impl.hpp"
#include "group/reduce/gradient_dtypes.hpp"
#include "param/fsdp_param.hpp"

namespace fsdp {

void GradientStore::arrived(size_t index) {
  auto& param = params_gradients_[index];
  if (param.has_arrived) return;
  param.has_arrived = true;
  ++arrived_;
  as_expected_ += param.is_expected ? 1 : 0;
}

bool GradientStore::is_complete(size_t trainable) const {
  return arrived_ == trainable || (expected_ > 0 && arrived_ == expected_ && as_expected_ == expected_);
}

void GradientStore::end_backward() {
  const bool learns = arrived_ > 0;
  for (auto& param : params_gradients_) {
    if (learns) param.is_expected = param.has_arrived;
    param.has_arrived = false;
  }
  if (learns) expected_ = arrived_;
  arrived_ = as_expected_ = 0;
  is_reduced_ = false;
}

void GradientStore::reset() {
  end_backward();
  for (auto& param : params_gradients_) param.is_expected = false;
  expected_ = 0;
}

bool GradientStore::has_partial_sums() const {
  return std::ranges::any_of(params_gradients_, [](const ParamGradients& param) { return param.partial_sum.defined(); });
}

namespace {

/// Of a user's torch::autograd::Function, say: what is the same on all ranks already, or a mix of all ranks', is no summand of
/// a mean.
void refuse_dtensor(at::Tensor& gradient, const std::string& name) {
  if (!gradient.defined() || DTensorImpl::of(gradient) == nullptr) return;
  gradient.reset();
  throw UsageError(
      fmt::format("{}: was brought a gradient that is a DTensor, by a torch::autograd::Function perhaps; expected this "
                  "rank's own gradient of the whole parameter, an ordinary tensor, as the mean over the ranks is taken. "
                  "Compute it from fsdp::full_tensor(tensor) where it is made of DTensors",
                  name));
}

/// Autograd leaves on a parameter what an operator gave: a sparse tensor, or a subclass's where one was beside the parameter.
at::Tensor take_plain(at::Tensor& gradient, const std::string& name) {
  constexpr c10::DispatchKeySet dense(c10::DispatchKey::Dense);
  if ((gradient.key_set() & (kNotPlain | dense | c10::DispatchKeySet(kResidencyKey))) == dense) [[likely]]
    return std::exchange(gradient, {});
  refuse_dtensor(gradient, name);
  try {
    if (!is_plain(gradient)) gradient = plain_values(gradient);
  } catch (const std::exception& error) {
    keep_host_error(error);
    log().error("{}: its gradient is {}, whose values cannot be copied to a plain tensor", name, what_it_is(gradient));
    throw;
  }
  return std::exchange(gradient, {});
}

}  // namespace

at::Tensor GradientStore::take(size_t index) {
  auto& accumulated = params_gradients_[index].accumulated;
  auto* unsharded_param = params_[index].unsharded.peek();
  auto gradient = unsharded_param ? take_plain(accumulated_grad(*unsharded_param), params_[index].name()) : at::Tensor();
  if (!accumulated.defined()) return gradient;
  if (gradient.defined()) accumulated.add_(gradient);
  return std::exchange(accumulated, {});
}

int64_t GradientStore::bytes_to_take(size_t index) const {
  const auto& sum = params_gradients_[index].accumulated;
  if (!sum.defined() || !sum.is_cpu()) return 0;
  const auto unsharded_param = params_[index].unsharded_param();
  if (!unsharded_param.defined() || !accumulated_grad(unsharded_param).defined()) return 0;
  return accumulated_grad(unsharded_param).scalar_type() == sum.scalar_type() ? 0 : static_cast<int64_t>(sum.nbytes());
}

void GradientStore::record_use(c10::Stream stream) const {
  for (size_t i = 0; i < params_gradients_.size(); ++i) {
    if (auto* unsharded_param = params_[i].unsharded.peek())
      fsdp::record_use(accumulated_grad(*unsharded_param), stream);
    fsdp::record_use(params_gradients_[i].accumulated, stream);
  }
}

bool GradientStore::has_unreduced(bool counts_partial_sums) const {
  for (size_t i = 0; i < params_gradients_.size(); ++i) {
    if (auto* unsharded_param = params_[i].unsharded.peek(); unsharded_param && accumulated_grad(*unsharded_param).defined())
      return true;
    if (params_gradients_[i].accumulated.defined()) return true;
    if (counts_partial_sums && params_gradients_[i].partial_sum.defined()) return true;
  }
  return false;
}

void GradientStore::accumulate(const GradientDtypes& dtypes) {
  BelowResidency below;
  for (size_t i = 0; i < params_gradients_.size(); ++i) {
    const auto dtype = dtypes.reduce_dtype(i);
    const auto unsharded_param = params_[i].unsharded_param();
    if (dtype == params_[i].spec.param_dtype || !unsharded_param.defined() || !accumulated_grad(unsharded_param).defined())
      continue;
    params_gradients_[i].accumulated = take(i).to(dtype);
  }
}

void GradientStore::drop() {
  for (size_t i = 0; i < params_gradients_.size(); ++i) {
    if (const auto unsharded_param = params_[i].unsharded_param(); unsharded_param.defined())
      accumulated_grad(unsharded_param).reset();
    params_gradients_[i].partial_sum.reset();
    params_gradients_[i].accumulated.reset();
  }
}

}  // namespace fsdp
