#include "root/group_port.hpp"

#include <c10/util/SmallVector.h>

#include <utility>

#include "base/log.hpp"
#include "dispatch/residency.hpp"
#include "dtensor/function_scope.hpp"
#include "fsdp/dtensor.hpp"
#include "root/autograd/gradient_hook.hpp"
#include "root/edit/tied_groups.hpp"

namespace fsdp {

GroupPort::GroupPort(GroupIdentity identity, GroupConfig config, const std::vector<GroupParam>& params)
    : group_(link_, std::move(identity), std::move(config), params) {
  const auto& policy = group_.parts().config.mp_policy;
  set_casts_operands(policy.param_dtype && policy.cast_forward_inputs);
  set_follows_mode(policy.full_precision_in_eval);
  for (size_t i = 0; i < params.size(); ++i)
    if (params[i].is_dtensor && !group_.params()[i].spec.dtensor) watch_requires_grad();
}

GroupPort::~GroupPort() {
  if (root_) {
    std::lock_guard lock(root_->mutex());
    group_.unsharder().abandon();
    try {
      root_->runner().remove(group_);
    } catch (const std::exception& error) {
      log().error("{}: removing a destroyed module failed: {}", group_.name(), error.what());
    }
  }
  *link_ = nullptr;
}

std::shared_ptr<ParamGroup> make_group(GroupIdentity identity, GroupConfig config, const std::vector<GroupParam>& params) {
  return std::make_shared<GroupPort>(std::move(identity), std::move(config), params)->share_group();
}

void GroupPort::attach() {
  const auto ties = std::exchange(group_.tied(), {});
  for (const auto& tied : ties) take_tied(group_, tied);
  group_.attach();
  const auto self = std::static_pointer_cast<GroupPort>(shared_from_this());
  for (size_t i = 0; i < group_.params().size(); ++i) install_gradient_hook(group_.params()[i].unsharded_param(), self, i);
}

void GroupPort::make_resident(std::span<ParamOwner* const> owners, const OperatorUse& use) {
  if (owners.size() == 1) {  // most often
    const auto root = root_;
    ParamGroup* const alone = &group_;
    return root->touch({&alone, 1}, use);
  }
  // One operator may touch groups of several roots; each root sees its own.
  c10::SmallVector<GroupPort*, 4> waiting;
  for (auto* owner : owners) waiting.push_back(static_cast<GroupPort*>(owner));
  while (!waiting.empty()) {
    const auto first = waiting.front()->root();
    c10::SmallVector<ParamGroup*, 4> mine;
    c10::SmallVector<GroupPort*, 4> others;
    for (auto* port : waiting)
      if (port->root_ == first)
        mine.push_back(&port->group_);
      else
        others.push_back(port);
    first->touch({mine.data(), mine.size()}, use);
    waiting = std::move(others);
  }
}

void GroupPort::note_write(size_t index) {
  group_.changes().note_write(index);
  mark_not_ready();  // the next touch is to see it
  if (is_between_steps()) return;
  // What was gathered in this step, or is kept of it, is not to be mixed with what is gathered later.
  const auto root = root_;
  std::lock_guard lock(root->mutex());
  root->runner().tell(GroupEvent::kWritten, group_);
}

void GroupPort::carry_write(size_t index) {
  const auto root = root_;
  std::lock_guard lock(root->mutex());
  BelowResidency below;
  group_.unsharder().write_back(index);
  // Outside a step the ranks may have written different values (each its own random numbers); the
  // version that moves makes the next touch gather what all of them hold. Within a step
  // the unsharded parameter stays as written, or autograd would refuse a legal write before a use.
  auto& param = group_.params()[index];
  if (in_step(root->step().state()) || group_.parts().is_never_released())
    param.mark_written();
  else
    param.mark_sharded_written();
}

void GroupPort::follow_mode() {
  const auto root = root_;
  std::lock_guard lock(root->mutex());
  root->take_over_modes();
}

void GroupPort::take_over_requires_grad(size_t index) {
  const auto root = root_;
  std::lock_guard lock(root->mutex());
  // Most often nothing has changed: so this one is looked at before all of the group.
  auto& params = group_.params();
  const bool has_changed = index >= params.size() || params[index].has_new_requires_grad();
  if (has_changed && !is_backward(root->step().state())) group_.changes().sync_requires_grad();
}

at::Tensor whole_of_part(const FSDPParam& param, const at::Tensor& unsharded) {
  const auto& part = param.spec.reach.part;
  if (!unsharded.defined() || !part || part->is_whole() || !param.spec.dtensor) return unsharded;
  return DTensor::from_local(unsharded, part->mesh, part->placements, part->sizes, part->strides).full_tensor();
}

at::Tensor GroupPort::recorded_param(size_t index) const {
  const auto& param = group_.params()[index];
  return whole_of_part(param, param.unsharded_param());
}

bool GroupPort::is_in_scope() const { return root_->step().is_in_scope() || is_in_function(); }

}  // namespace fsdp
