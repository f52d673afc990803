#include "module/state/tree_hooks.hpp"

#include <torch/csrc/autograd/graph_task.h>

#include "dispatch/host_lock.hpp"
#include "module/attach.hpp"
#include "module/state/module_state.hpp"

namespace fsdp {

namespace {

/// Throws StateError if an entry of a parameter table no longer holds its sharded parameter, or if a tie across groups has not
/// been settled.
void check_entries(ModuleState& state) {
  state.ties().check(state.tree().description());
  for (const auto& weak : state.ties().sharers())
    if (const auto sharer = weak.lock()) sharer->ties().check(sharer->tree().description());
  for (const auto& owned : state.groups()) check_registrations(owned);
}

}  // namespace

TreeHooks::TreeHooks(ModuleState& root) : root_(root.weak_from_this()) {
  root.visit([&](ModuleState& state) {
    has_modes_ |= state.precision().follows_modes();
    if (!state.pass()) return;
    state.pass()->set_has_begun(false);
    passes_.push_back(state.pass());
  });
}

void TreeHooks::check_modules() {
  if (const auto root = root_.lock())
    root->visit([](ModuleState& below) {
      if (below.watch().has_changed()) [[unlikely]]
        attach_late(below.shared_from_this());
      check_entries(below);
    });
}

void TreeHooks::follow_modes() {
  if (!has_modes_) return;
  if (const auto root = root_.lock()) root->visit([](ModuleState& below) { below.precision().follow_modes(below.groups()); });
}

void TreeHooks::check_mode(const ParamGroup& group) {
  const auto state = ModuleState::of(group);
  const bool own = group.parts().computes_in_own_dtype;
  if (!state || state->precision().wants_own_dtype() == own) return;
  throw StateError(
      fmt::format("'{}' went from {} in the middle of a step, which full_precision_in_eval cannot follow. Run the "
                  "backward of the last forward first, or reset_iter_state(); a forward without backward belongs "
                  "under torch::NoGradGuard or fsdp::forward_scope",
                  group.name(), own ? "eval to training mode" : "training to eval mode"));
}

template <class Visit>
void TreeHooks::with_views(const Visit& visit) const {
  if (passes_.empty()) return;
  const WithHostLock lock;  // once, not for each
  for (const auto& weak : passes_)
    if (const auto pass = weak.lock())
      if (const auto view = pass->view()) visit(*pass, *view);
}

void TreeHooks::take_over() {
  if (passes_.empty()) return;
  // A backward is of the parameters that its forward had.
  if (torch::autograd::get_current_graph_task_id() == -1)
    with_views([](ModulePass&, ModulePass::View& view) { view.take_changes(); });
  with_views([](ModulePass&, ModulePass::View& view) { view.take_over(); });
}

void TreeHooks::show(ShowsEvent event) {
  with_views([event](ModulePass& pass, ModulePass::View& view) {
    if (const auto form = pass.on(event)) view.show(*form);
    view.show_gradients();
  });
}

void TreeHooks::show_for_hook(const ParamGroup& group) {
  if (passes_.empty()) return;
  if (const auto state = ModuleState::of(group); state && state->pass()) state->pass()->show_behind(ShowsEvent::kHookRuns);
}

void TreeHooks::begin() {
  with_views([](ModulePass&, ModulePass::View& view) { view.begin(); });
  for (const auto& weak : passes_)
    if (const auto pass = weak.lock()) pass->set_has_begun(true);
}

size_t TreeHooks::give_up_forwards() {
  size_t open = 0;
  for (const auto& weak : passes_)
    if (const auto pass = weak.lock()) open += pass->give_up();
  return open;
}

}  // namespace fsdp
