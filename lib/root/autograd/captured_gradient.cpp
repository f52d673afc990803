#include "root/autograd/captured_gradient.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include "base/plain_values.hpp"
#include "dispatch/residency.hpp"
#include "dtensor/dtensor_impl.hpp"
#include "dtensor/function_scope.hpp"
#include "group/reduce/mean_over_ranks.hpp"
#include "root/group_port.hpp"
#include "tensor/shard_part.hpp"

namespace fsdp {

namespace {

using torch::autograd::variable_list;

/// How a gradient lies before it is reduced: every rank has a summand of all of it.
DTensorSpec unreduced(const ParamGroup& group, const ParamSpec& spec) {
  const auto& mesh = group.identity().mesh_info.mesh;
  return {mesh, std::vector<Placement>(static_cast<size_t>(mesh.ndim()), Partial{}), spec.sizes(), spec.strides(), spec.name};
}

/// Summed over the ranks on the way to `placements`, divided and cast, as a reduction does it.
at::Tensor mean_of(const ParamGroup& group, size_t index, const at::Tensor& gradient, std::vector<Placement> placements) {
  const auto way = way_to(unreduced(group, group.params()[index].spec), std::move(placements), "gradient");
  const auto dtypes = reduce_dtypes(group, index, gradient.scalar_type());
  const auto [before, after] = division_of(group, dtypes.sum);
  const auto summand = plain_values(gradient).to(dtypes.sum);
  return (redistribute_piece(before == 1 ? summand : summand / before, way) / after).to(dtypes.kept);
}

/// The mean over the ranks, in pieces.
at::Tensor reduced(const ParamGroup& group, size_t index, const at::Tensor& gradient) {
  const auto& spec = group.params()[index].spec;
  const auto& info = group.identity().mesh_info;
  auto placements = info.placements();
  for (auto& placement : placements)
    if (auto* shard = std::get_if<Shard>(&placement)) {
      if (spec.layout.is_flat())
        placement = Replicate{};
      else
        shard->dim = spec.layout.dim();
    }
  const BelowResidency below;
  auto local = mean_of(group, index, gradient.detach(), std::move(placements));
  if (spec.layout.is_flat()) local = part_of(spec.layout, local, spec.rank);
  return make_dtensor(local, spec.dtensor, WholeStorage::Message::kFull);
}

class MeanWithHistory : public torch::autograd::Function<MeanWithHistory> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& gradient, const ParamGroup* group,
                            size_t index) {
    const std::vector<Placement> everywhere(static_cast<size_t>(group->identity().mesh_info.mesh.ndim()), Replicate{});
    return mean_of(*group, index, gradient, everywhere);
  }
  static variable_list backward(torch::autograd::AutogradContext*, variable_list gradients) {
    return {gradients[0], at::Tensor(), at::Tensor()};
  }
};

class CaptureHook final : public torch::autograd::FunctionPreHook {
 public:
  CaptureHook(std::shared_ptr<GroupPort> port, size_t index) : port_(std::move(port)), index_(index) {}

  variable_list operator()(const variable_list& gradients) override {
    end_functions();
    const auto& group = port_->group();
    if (!gradients[0].defined() || !is_captured(group)) return gradients;
    if (at::GradMode::is_enabled() && gradients[0].requires_grad())
      return {whole_of_part(group.params()[index_], MeanWithHistory::apply(gradients[0], &group, index_))};
    return {reduced(group, index_, gradients[0])};
  }

 private:
  /// Asked for, and not on its way to anybody else.
  bool is_captured(const ParamGroup& group) const {
    const auto* tasks = torch::autograd::get_current_graph_task_exec_info();
    if (tasks == nullptr || tasks->empty() || !group.params()[index_].spec.dtensor) return false;
    const auto unsharded = group.params()[index_].unsharded_param();
    if (!unsharded.defined()) return false;
    const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(unsharded);
    const auto found = tasks->find(accumulator.get());
    return found != tasks->end() && found->second.captures_ && !found->second.needed_;
  }

  // The unsharded parameter keeps its group alive, not the other way round.
  std::shared_ptr<GroupPort> port_;
  size_t index_;
};

}  // namespace

void install_capture_hook(const at::Tensor& unsharded_param, std::shared_ptr<GroupPort> port, size_t index) {
  auto& hooks = torch::autograd::impl::get_autograd_meta(unsharded_param)->hooks_;
  // One that is there may be another group's, which has given the parameter up.
  std::erase_if(hooks, [](const auto& hook) { return dynamic_cast<const CaptureHook*>(hook.get()) != nullptr; });
  hooks.push_back(std::make_unique<CaptureHook>(std::move(port), index));
}

}  // namespace fsdp
