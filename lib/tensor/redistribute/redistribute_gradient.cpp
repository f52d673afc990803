#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>

#include "tensor/redistribute/redistribute.hpp"
#include "tensor/redistribute/redistribution_plan.hpp"

namespace fsdp {
namespace {

struct RecordedWay : torch::CustomClassHolder {
  RecordedWay(Redistribution way, std::vector<Placement> gradient) : way(std::move(way)), gradient(std::move(gradient)) {}

  /// What the gradient's way back is.
  Redistribution back() const {
    return {.mesh = way.mesh,
            .sizes = way.sizes,
            .strides = way.strides,
            .from = gradient,
            .to = default_gradient(way.from),
            .subject = "gradient of " + way.subject};
  }

  const Redistribution way;
  const std::vector<Placement> gradient;
};

bool moves_nothing(const Redistribution& way) {
  return RedistributionPlan(way.sizes, way.mesh.shape(), way.from, way.to).moves_nothing();
}

class RecordedRedistribution : public torch::autograd::Function<RecordedRedistribution> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& local,
                            const c10::intrusive_ptr<RecordedWay>& recorded) {
    context->saved_data["way"] = c10::IValue::make_capsule(recorded);
    const at::Tensor piece = redistribute_piece(local, recorded->way);
    // Autograd has to tell the new piece from the old one.
    return piece.is_same(local) ? piece.clone() : piece;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const auto holder = context->saved_data["way"].toCapsule();
    const auto& recorded = static_cast<const RecordedWay&>(*holder);
    // Recorded again where the graph is kept for a second derivative.
    const Redistribution back = recorded.back();
    return {redistribute_recorded(gradients[0], back, default_gradient(back.to)), at::Tensor()};
  }
};

}  // namespace

bool is_recorded(const at::Tensor& local) { return at::GradMode::is_enabled() && local.requires_grad(); }

at::Tensor redistribute_recorded(const at::Tensor& local, const Redistribution& way, const std::vector<Placement>& gradient) {
  if (!is_recorded(local)) {
    const at::NoGradGuard no_grad;
    return redistribute_piece(local, way);
  }
  auto recorded = c10::make_intrusive<RecordedWay>(way, gradient);
  if (moves_nothing(way) && moves_nothing(recorded->back())) return local;
  return RecordedRedistribution::apply(local, recorded);
}

}  // namespace fsdp
