#include "dispatch/stand_in/gradient_fork.hpp"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <mutex>
#include <type_traits>

namespace fsdp {

namespace {

namespace autograd_impl = torch::autograd::impl;
using torch::autograd::Edge;
using torch::autograd::Node;
using torch::autograd::variable_list;
// Which pointers these are depends on torch's version.
using NodePtr = decltype(autograd_impl::grad_accumulator(std::declval<const at::Tensor&>()));
using WeakNodePtr = decltype(torch::autograd::AutogradMeta::grad_accumulator_);

template <class Made, class... Args>
NodePtr make_node(Args&&... args) {
  if constexpr (std::is_base_of_v<c10::intrusive_ptr_target, Made>)
    return c10::make_intrusive<Made>(std::forward<Args>(args)...);
  else
    return std::make_shared<Made>(std::forward<Args>(args)...);
}

bool is_of_kind(const at::Tensor& tensor) {
  return tensor.defined() && tensor.unsafeGetTensorImpl()->key_set().has(c10::DispatchKey::Python);
}

/// See Note [Gradients of stand-ins].
class GradientFork final : public Node {
 public:
  GradientFork(const at::Tensor& tensor, Edge own, Edge unsharded) : Node({std::move(own), std::move(unsharded)}) {
    add_input_metadata(tensor);
  }

  variable_list apply(variable_list&& gradients) override {
    auto& gradient = gradients[0];
    if (is_of_kind(gradient)) return {std::move(gradient), at::Tensor()};
    return {at::Tensor(), std::move(gradient)};
  }
  std::string name() const override { return "GradientFork"; }
};

/// Hands a gradient on as it is.
class HistoryOfStandIn final : public Node {
 public:
  explicit HistoryOfStandIn(torch::autograd::edge_list next) : Node(std::move(next)) {}
  variable_list apply(variable_list&& gradients) override { return std::move(gradients); }
  std::string name() const override { return "HistoryOfStandIn"; }
};

/// Autograd's own reference is a weak one, until the edge is there.
thread_local NodePtr made;

bool is_fork(const NodePtr& node) { return node && dynamic_cast<const GradientFork*>(node.get()) != nullptr; }

}  // namespace

struct OwnAccumulator {
  WeakNodePtr node;
};

void lead_edge_to_leaf(const at::Tensor& tensor, StandIn& stand_in) {
  const auto& own = stand_in.own_accumulator();
  if (own == nullptr) return;  // there has been no fork
  auto* meta = autograd_impl::get_autograd_meta(tensor);
  const std::lock_guard lock(meta->mutex_);
  const auto now = meta->grad_accumulator_.lock();
  if (!now || is_fork(now)) meta->grad_accumulator_ = own->node;
}

void lead_edge_to_fork(const at::Tensor& tensor, StandIn& stand_in) {
  if (!tensor.requires_grad()) return;
  const auto unsharded = stand_in.leaf();
  if (!unsharded.defined() || !unsharded.requires_grad()) return;
  lead_edge_to_leaf(tensor, stand_in);
  auto own = autograd_impl::grad_accumulator(tensor);
  stand_in.own_accumulator() = std::make_shared<OwnAccumulator>(OwnAccumulator{WeakNodePtr(own)});
  made = make_node<GradientFork>(tensor, Edge(std::move(own), 0), autograd_impl::gradient_edge(unsharded));
  auto* meta = autograd_impl::get_autograd_meta(tensor);
  const std::lock_guard lock(meta->mutex_);
  meta->grad_accumulator_ = WeakNodePtr(made);
}

void end_leading() { made = NodePtr(); }

at::Tensor with_history_of(const at::Tensor& tensor, const at::Tensor& ordinary) {
  auto linked = ordinary.detach();
  torch::autograd::set_history(linked, make_node<HistoryOfStandIn>(torch::autograd::collect_next_edges(tensor)));
  return linked;
}

}  // namespace fsdp
