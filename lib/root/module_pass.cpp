#include "root/module_pass.hpp"

#include <torch/csrc/autograd/engine.h>

#include <algorithm>

#include "base/log.hpp"
#include "dispatch/host_lock.hpp"
#include "root/group_port.hpp"

namespace fsdp {

namespace {

void make_resident(const std::vector<std::shared_ptr<ParamGroup>>& groups, const OperatorUse& use) {
  std::vector<ParamOwner*> owners;
  for (const auto& group : groups) owners.push_back(&group->parts().owner());
  if (!owners.empty()) owners[0]->make_resident(owners, use);
}

const GroupState& state_of(const ParamGroup& group) {
  return root_of(group).runner().scheduler().groups()[group.identity().id];
}

bool reshards_after_forward(const std::shared_ptr<ParamGroup>& group) { return state_of(*group).facts.reshards_after_forward; }

}  // namespace

ModulePass::Groups ModulePass::live_groups() const {
  Groups live;
  for (const auto& weak : groups_)
    if (auto group = weak.lock()) live.push_back(std::move(group));
  return live;
}

void ModulePass::begin(RootContext& root) {
  if (has_begun_.load(std::memory_order_relaxed)) return;
  std::lock_guard lock(root.mutex());
  const auto hooks = root.hooks();
  hooks->begin();
}

void ModulePass::try_to_enter(RootContext& root, size_t module) {
  std::lock_guard lock(root.mutex());
  forwards_.try_to_enter(module);
}

bool ModulePass::ends_what_has_entered(RootContext& root, size_t module) {
  std::lock_guard lock(root.mutex());
  return forwards_.ends_what_has_entered(module);
}

std::optional<Shows> ModulePass::enter(RootContext& root, size_t module, bool records_autograd) {
  std::lock_guard lock(root.mutex());
  root.enter_scope();
  try {
    make_resident(live_groups(), {.records_autograd = records_autograd});
  } catch (...) {
    root.leave_scope();
    throw;
  }
  forwards_.enter(module);
  return on(ShowsEvent::kForwardBegins);
}

std::optional<Shows> ModulePass::leave(RootContext& root, bool keeps_post_forward_shard) noexcept {
  std::lock_guard lock(root.mutex());
  if (!is_inside()) return std::nullopt;  // given up since, by a hook of a user's
  const auto before = shows_.load();
  PassFacts facts = {.now = shows_, .pass_is_over = forwards_.leave(), .keeps_post_forward_shard = keeps_post_forward_shard};
  try {
    const auto groups = live_groups();
    facts.reshards_after_forward = facts.pass_is_over && std::ranges::any_of(groups, reshards_after_forward);
    shows_ = shows_behind(ShowsEvent::kForwardEnds, facts);
    if (facts.reshards_after_forward)
      for (const auto& group : groups) root.control(*group, GroupEvent::kUserLetsGo);
  } catch (const std::exception& error) {
    log().error("releasing parameters behind a forward failed: {}", error.what());
  }
  root.leave_scope();  // it may end the step, behind which the view shows what it is told
  return shows_ == before ? std::nullopt : std::optional(shows_.load());
}

void ModulePass::reach_backward(const std::shared_ptr<RootContext>& root, bool gathers) {
  std::lock_guard lock(root->mutex());
  root->join_backward();
  if (shows_ == Shows::kUnsharded) return;
  if (gathers) make_resident(live_groups(), {});
  show_behind(ShowsEvent::kBackwardReaches);
  // A backward that needs none of the unsharded parameters does not reach the root, which would tell of its end.
  torch::autograd::Engine::get_default_engine().queue_callback([weak = weak_from_this(), root] {
    const auto pass = weak.lock();
    if (!pass) return;
    std::lock_guard lock(root->mutex());
    pass->show_behind(ShowsEvent::kBackwardIsOver);
  });
}

PassFacts ModulePass::facts_for(ShowsEvent event) const {
  PassFacts facts = {.now = shows_, .is_inside = is_inside()};
  const bool asks_held = event == ShowsEvent::kHookRuns;
  const bool asks_kept = event == ShowsEvent::kStepEnds || event == ShowsEvent::kBackwardIsOver;
  if (facts.is_inside || !(asks_held || asks_kept)) return facts;
  for (const auto& weak : groups_) {
    const auto group = weak.lock();
    if (!group) continue;
    // Amid a step the scheduler is ahead of what has been done.
    if (asks_held) facts.is_held |= group->unsharder().is_held();
    if (asks_kept) facts.is_kept |= state_of(*group).is_kept();
  }
  return facts;
}

std::optional<Shows> ModulePass::on(ShowsEvent event) {
  const auto form = shows_behind(event, facts_for(event));
  if (form == shows_ && !is_asked_for(event)) return std::nullopt;
  shows_ = form;
  return form;
}

void ModulePass::show_behind(ShowsEvent event) {
  const auto form = on(event);
  if (!form) return;
  const WithHostLock lock;
  if (const auto view = this->view()) view->show(*form);
}

size_t ModulePass::give_up() {
  const size_t depth = forwards_.depth();
  forwards_.begin_anew();
  return depth;
}

}  // namespace fsdp
