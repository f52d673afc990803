#include "module/state/module_state.hpp"

#include <algorithm>

#include "module/module_walk.hpp"
#include "module/state/tree_hooks.hpp"

namespace fsdp {

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
  visit([&](ModuleState& state) {
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
  context_->hooks() = std::make_shared<TreeHooks>(*this);
}

void ModuleState::set_pass(std::shared_ptr<ModulePass> pass) {
  const auto root = this->root();
  const std::lock_guard lock(root->context_->mutex());
  pass_ = std::move(pass);
  give_pass_groups();
  root->context_->hooks() = std::make_shared<TreeHooks>(*root);
}

void ModuleState::give_pass_groups() const {
  if (!pass_) return;
  std::vector<std::weak_ptr<ParamGroup>> groups;
  for (const auto& owned : groups_) groups.push_back(owned.group);
  pass_->set_groups(std::move(groups));
}

void ModuleState::add_groups(std::vector<OwnedGroup> groups) {
  for (auto& owned : groups) {
    const auto group = owned.group.lock();
    owned.suffix += fmt::format(" [{}]", groups_.size() + 1);  // no two groups have one name
    context_->add(group);
    groups_.push_back(std::move(owned));
  }
  give_pass_groups();
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
    std::vector<std::string> full;
    for (const auto& param : owned.params) full.push_back(tree_.full_name(param, above));
    group->place({.enter = enter, .exit = exit}, tree_.description() + owned.suffix, std::move(full));
  }
}

}  // namespace fsdp
