#include "root/autograd/left_gradients.hpp"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <utility>

#include "group/reduce/reduce_call.hpp"
#include "root/root_context.hpp"

namespace fsdp {

namespace {

struct Left {
  std::weak_ptr<RootContext> root;
  std::thread::id thread;
};

/// Never destroyed: backwards may run while the process ends.
struct Registry {
  std::mutex mutex;
  std::vector<Left> left;
  std::atomic<size_t> count = 0;  // for all the backwards that have nothing to do with it
};
Registry& registry() {
  static auto* all = new Registry;
  return *all;
}

void note(std::weak_ptr<RootContext> root, std::thread::id thread) {
  auto& all = registry();
  std::lock_guard lock(all.mutex);
  std::erase_if(all.left, [&](const Left& left) {
    return left.root.expired() || (!left.root.owner_before(root) && !root.owner_before(left.root));
  });
  all.left.push_back({std::move(root), thread});
  all.count = all.left.size();
}

/// This thread's, taken out.
std::vector<std::shared_ptr<RootContext>> take_roots() {
  auto& all = registry();
  if (all.count == 0) return {};
  std::vector<std::shared_ptr<RootContext>> found;
  std::lock_guard lock(all.mutex);
  std::erase_if(all.left, [&](const Left& left) {
    if (left.thread != std::this_thread::get_id()) return false;
    if (auto root = left.root.lock()) found.push_back(std::move(root));
    return true;
  });
  all.count = all.left.size();
  return found;
}

}  // namespace

LeftGradients left_gradients_of(RootContext& root) {
  std::lock_guard lock(root.mutex());
  if (root.step().is_manual()) return LeftGradients::kNone;  // whoever finalizes reduces them
  const bool is_launched = !root.runner().reductions().is_empty();
  const auto& groups = root.runner().groups();
  const auto is_to_reduce = [](const auto* group) { return has_gradients_to_reduce(*group); };
  if ((is_launched && root.options().is_last_backward) || std::ranges::any_of(groups, is_to_reduce))
    return LeftGradients::kToReduce;
  const auto has_some = [](const auto* group) { return group->gradients().store.has_unreduced(/*counts_partial_sums=*/true); };
  return is_launched || std::ranges::any_of(groups, has_some) ? LeftGradients::kNotYet : LeftGradients::kNone;
}

void note_left_gradients(RootContext& root, std::thread::id thread) {
  // Only where the user has asked for it: to look at every gradient takes time.
  const auto keeps = [](const auto* group) {
    const auto& config = group->options().reduce;
    return !config.requires_gradient_sync || !config.requires_all_reduce;
  };
  if (root.options().is_last_backward && std::ranges::none_of(root.runner().groups(), keeps)) return;
  if (left_gradients_of(root) != LeftGradients::kNone) note(root.weak_from_this(), thread);
}

JoinedRoots::JoinedRoots(const at::Tensor& tensor) : tensor_(tensor) {
  if (!tensor.defined() || !tensor.requires_grad()) return;
  for (const auto& root : take_roots()) {
    const auto left = left_gradients_of(*root);
    if (left == LeftGradients::kNone) continue;
    if (left == LeftGradients::kToReduce)
      hooks_.push_back(tensor.register_hook([root](const at::Tensor&) { root->join_backward(); }));
    note(root, std::this_thread::get_id());  // until they are reduced
  }
}

JoinedRoots::~JoinedRoots() {
  for (const unsigned hook : hooks_) tensor_.remove_hook(hook);
}

}  // namespace fsdp
