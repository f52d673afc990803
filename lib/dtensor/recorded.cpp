#include "dtensor/recorded.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>

#include "dtensor/dtensor_impl.hpp"
#include "dtensor/function_scope.hpp"
#include "tensor/full_tensor.hpp"
#include "tensor/strides.hpp"

namespace fsdp {

namespace {

using Placements = std::vector<Placement>;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// What a function needs again in its backward.
struct Recorded : torch::CustomClassHolder {
  DTensorSpec::Ptr spec = {};  ///< of the operand, or of what from_local makes
  Redistribution way = {};     ///< of redistribute
  Placements gradient = {};    ///< how the result's gradient is placed
  std::string subject = {};    ///< of the gradient's collectives
  bool is_leaf = false;        ///< the operand: its gradient is what users see
};
using Held = c10::intrusive_ptr<Recorded>;

void keep(AutogradContext* context, const Held& held) { context->saved_data["held"] = c10::IValue::make_capsule(held); }
Held kept(AutogradContext* context) {
  return c10::static_intrusive_pointer_cast<Recorded>(context->saved_data["held"].toCapsule());
}

/// A tensor of the spec's sizes with these placements; of a flat layout, which has none, as the spec.
DTensorSpec::Ptr placed_spec(const DTensorSpec::Ptr& spec, const Placements& placements) {
  return spec->is_flat() ? spec : spec_like(*spec, spec->sizes(), placements, spec->strides());
}

at::Tensor recorded_piece_of(const at::Tensor& dtensor);

/// A gradient of a tensor of the spec's sizes, of either kind, as a DTensor with these placements.
at::Tensor placed(const at::Tensor& gradient, const DTensorSpec::Ptr& to_spec, const Placements& placements,
                  const std::string& subject) {
  const auto& spec = *to_spec;
  const auto* dtensor = DTensorImpl::of(gradient);
  if (dtensor == nullptr) {
    const auto to = placed_spec(to_spec, placements);
    const auto piece = part_of(*to, gradient);
    return is_recorded(piece) ? recorded_from_local(piece, to) : make_dtensor(piece, to);
  }
  if (dtensor->spec().is_flat() == spec.is_flat() && dtensor->spec().placements() == placements) return gradient;
  if (spec.is_flat())  // of the whole
    return placed(recorded_piece_of(placed(gradient, dtensor->value().spec, placements, subject)), to_spec, placements,
                  subject);
  auto way = way_to(dtensor->spec(), placements, subject);
  way.subject = subject;
  // Recorded again where the graph is kept for a second derivative.
  if (is_recorded(gradient)) return recorded_redistribution(gradient, std::move(way), default_gradient(placements));
  return make_dtensor(redistribute_piece(dtensor->local(), way), spec_like(spec, spec.sizes(), placements, spec.strides()));
}

/// The piece of a DTensor, recorded where it is.
at::Tensor recorded_piece_of(const at::Tensor& dtensor) {
  const auto& impl = *DTensorImpl::of(dtensor);
  return is_recorded(dtensor) ? recorded_to_local(dtensor, default_gradient(impl.spec().placements())) : impl.local();
}

class FromLocal : public torch::autograd::Function<FromLocal> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& local, const Held& held) {
    keep(context, held);
    return make_dtensor(local.detach(), held->spec, WholeStorage::Message::kFull);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto held = kept(context);
    return {recorded_piece_of(placed(gradients[0], held->spec, held->gradient, held->subject)), at::Tensor()};
  }
};

class ToLocal : public torch::autograd::Function<ToLocal> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& dtensor, const Held& held) {
    keep(context, held);
    return DTensorImpl::of(dtensor)->local().detach();
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto held = kept(context);
    const auto& spec = *held->spec;
    const auto piece = placed_spec(held->spec, held->gradient);
    const auto gradient =
        is_recorded(gradients[0]) ? recorded_from_local(gradients[0], piece) : make_dtensor(gradients[0], piece);
    // Whoever made a tensor that is no leaf brings its gradient where it belongs, in one step.
    if (!held->is_leaf) return {gradient, at::Tensor()};
    return {placed(gradient, held->spec, default_gradient(spec.placements()), held->subject), at::Tensor()};
  }
};

class Redistribute : public torch::autograd::Function<Redistribute> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& dtensor, const Held& held) {
    keep(context, held);
    const auto& spec = *held->spec;
    const auto& local = DTensorImpl::of(dtensor)->local();
    const auto piece = spec.is_flat() ? full_of(spec, local, "full_tensor") : redistribute_piece(local, held->way);
    return make_dtensor(piece.detach(), spec_like(spec, spec.sizes(), held->way.to, spec.strides()));
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto held = kept(context);
    const auto given = DTensorImpl::of(gradients[0]) != nullptr
                           ? gradients[0]
                           : placed(gradients[0], held->spec, held->gradient, held->subject);
    return {placed(given, held->spec, default_gradient(held->spec->placements()), held->subject), at::Tensor()};
  }
};

Held held_for(const at::Tensor& dtensor, Placements gradient, std::string subject) {
  auto held = c10::make_intrusive<Recorded>();
  held->spec = DTensorImpl::of(dtensor)->value().spec;
  held->gradient = std::move(gradient);
  held->subject = "gradient of " + subject;
  held->is_leaf = dtensor.is_leaf();
  return held;
}

}  // namespace

at::Tensor recorded_from_local(const at::Tensor& local, DTensorSpec::Ptr spec) {
  auto held = c10::make_intrusive<Recorded>();
  held->gradient = default_gradient(spec->placements());
  held->subject = "gradient of from_local " + sizes_text(spec->sizes());
  held->spec = std::move(spec);
  return FromLocal::apply(local, held);
}

at::Tensor recorded_to_local(const at::Tensor& dtensor, Placements gradient) {
  const AsksForDTensor asks;
  return ToLocal::apply(dtensor, held_for(dtensor, std::move(gradient), "to_local " + sizes_text(dtensor.sizes())));
}

at::Tensor recorded_redistribution(const at::Tensor& dtensor, Redistribution way, Placements gradient) {
  auto held = held_for(dtensor, std::move(gradient), way.subject);
  held->way = std::move(way);
  const AsksForDTensor asks;
  return Redistribute::apply(dtensor, held);
}

at::Tensor recorded_whole(const at::Tensor& dtensor, std::string_view operation) {
  const auto spec = DTensorImpl::of(dtensor)->value().spec;
  const Placements everywhere(spec->placements().size(), Replicate{});
  const auto moved = recorded_redistribution(dtensor, way_to(*spec, everywhere, operation), everywhere);
  const auto local = recorded_to_local(moved, everywhere);
  return local.strides() == c10::IntArrayRef(spec->strides()) ? local : local.as_strided(spec->sizes(), spec->strides());
}

}  // namespace fsdp
