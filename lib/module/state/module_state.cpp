#include "module/state/module_state.hpp"

#include <algorithm>

#include "module/attach.hpp"
#include "module/module_walk.hpp"

namespace fsdp {

/// What the module tree has to do around its root's steps.
class ModuleState::TreeHooks final : public StepHooks {
 public:
  /// has_modes: a group's dtype depends on its modules' mode.
  TreeHooks(std::weak_ptr<ModuleState> root, bool has_modes) : root_(std::move(root)), has_modes_(has_modes) {}

  void check_modules() override {
    if (const auto root = root_.lock())
      root->visit([](ModuleState& below) {
        if (below.watch_.has_changed()) [[unlikely]]
          attach_late(below.shared_from_this());
        below.check_registrations();
      });
  }
  void follow_modes() override {
    if (!has_modes_) return;
    if (const auto root = root_.lock())
      root->visit([](ModuleState& below) { below.precision_.follow_modes(below.groups_); });
  }
  void check_mode(const ParamGroup& group) override {
    const auto state = ModuleState::of(group);
    const bool own = group.parts().computes_in_own_dtype;
    if (!state || state->precision_.wants_own_dtype() == own) return;
    throw StateError(fmt::format(
        "'{}' went from {} in the middle of a step, which full_precision_in_eval cannot follow. Run the "
        "backward of the last forward first, or reset_iter_state(); a forward without backward belongs "
        "under torch::NoGradGuard or fsdp::forward_scope",
        group.name(), own ? "eval to training mode" : "training to eval mode"));
  }

 private:
  std::weak_ptr<ModuleState> root_;
  bool has_modes_;
};

ModuleState::ModuleState(ShardRequest request, std::vector<Unit> units, std::vector<OwnedGroup> groups,
                         std::vector<SharedEntry> shared, std::shared_ptr<RootContext> context)
    : request_(std::move(request)),
      groups_(std::move(groups)),
      ties_(std::move(shared)),
      context_(std::move(context)),
      precision_(request_.options.mp_policy, units),
      tree_(std::move(units)) {}

std::shared_ptr<ModuleState> ModuleState::root() {
  auto state = shared_from_this();
  while (auto above = state->tree_.parent()) state = above;
  return state;
}

void ModuleState::visit(const std::function<void(ModuleState&)>& visitor) {
  visitor(*this);
  for (const auto& state : tree_.nested()) state->visit(visitor);
}

void ModuleState::set_reshard_after_forward(ReshardAfterForward request) {
  plan_reshard(groups_, request);
  request_.options.reshard_after_forward = request;
  apply_reshard(groups_, request, tree_.is_root());
}

void ModuleState::adopt(const NestedState& found) {
  const auto self = shared_from_this();
  const auto root = found.state->root();
  const bool is_ours = found.state->tree_.parent() == self;
  if (found.state == root || is_ours) found.state->tree_.set_path(*found.module, found.path);
  if (root == self) return;  // another of its units has brought it
  root->tree_.set_parent(self);
  tree_.add_nested(root);
}

void ModuleState::forget_settled_ties() {
  ties_.forget_settled();
  for (auto& owned : groups_)
    if (const auto group = owned.group.lock())
      std::erase_if(owned.registrations,
                    [&](const Registration& entry) { return group->params()[entry.param].has_moved_away; });
}

void ModuleState::take_root() {
  bool has_modes = false;
  visit([&](ModuleState& state) {
    has_modes |= state.precision_.follows_modes();
    if (state.context_ == context_) return;
    state.context_ = context_;
    for (const auto& group : state.live_groups()) {
      const auto before = GroupPort::of(*group).root();  // outlives the call that empties it
      {
        std::lock_guard lock(before->mutex());
        before->runner().remove(*group);
      }
      context_->add(group);
    }
  });
  number(0, "");
  context_->hooks().modules = std::make_shared<TreeHooks>(weak_from_this(), has_modes);
}

void ModuleState::add_groups(std::vector<OwnedGroup> groups) {
  for (auto& owned : groups) {
    const auto group = owned.group.lock();
    owned.suffix += fmt::format(" [{}]", groups_.size() + 1);  // no two groups have one name
    context_->add(group);
    groups_.push_back(std::move(owned));
  }
  if (!groups.empty()) root()->number(0, "");
}

void ModuleState::add_registration(const ParamGroup& group, Registration entry) {
  for (auto& owned : groups_)
    if (owned.group.lock().get() == &group) owned.registrations.push_back(std::move(entry));
}

int ModuleState::number(int next, const std::string& above) {
  tree_.set_name_below(above);
  const int enter = next++;
  for (const auto& state : tree_.nested()) next = state->number(next, tree_.name());
  rename_groups(above, enter, next);
  apply_reshard(groups_, request_.options.reshard_after_forward, tree_.is_root());
  return next;
}

void ModuleState::rename_groups(const std::string& above, int enter, int exit) const {
  for (const auto& owned : groups_) {
    const auto group = owned.group.lock();
    if (!group) continue;
    group->parts().tree = {.enter = enter, .exit = exit};
    std::vector<std::string> full;
    for (const auto& param : owned.params) full.push_back(tree_.full_name(param, above));
    group->parts().rename(tree_.description() + owned.suffix, full);
  }
}

void ModuleState::check_registrations() const {
  ties_.check(tree_.description());
  for (const auto& sharer : ties_.sharers())
    if (const auto state = sharer.lock()) state->ties_.check(state->tree_.description());
  for (const auto& owned : groups_) fsdp::check_registrations(owned);
}

}  // namespace fsdp
