#include "module/module_walk.hpp"

#include "base/require.hpp"
#include "dispatch/param_storage.hpp"
#include "dispatch/residency.hpp"
#include "module/module_access.hpp"
#include "module/module_path.hpp"
#include "module/state/module_table.hpp"

namespace fsdp {

namespace {

using torch::nn::Module;

class Walker {
 public:
  Walker(const std::vector<Module*>& roots, const std::vector<at::Tensor>& ignored_params,
         const std::vector<std::shared_ptr<Module>>& ignored_modules, const IsExempt& is_exempt)
      : roots_(roots.begin(), roots.end()) {
    walk_.is_exempt = is_exempt;
    for (const auto& param : ignored_params) walk_.ignored.insert(param.unsafeGetTensorImpl());
    for (const auto& module : ignored_modules) ignore_subtree(*module);
  }

  ModuleWalk run(const std::vector<Module*>& roots) {
    for (; unit_ < roots.size(); ++unit_) visit(*roots[unit_], "", /*is_start=*/true, /*is_exempt=*/false);
    return std::move(walk_);
  }

 private:
  void ignore_subtree(Module& module) {
    if (find_state(module) || !ignored_.insert(&module).second) return;
    for (const auto& param : ModuleAccess::parameters(module))
      if (param.value().defined()) walk_.ignored.insert(param.value().unsafeGetTensorImpl());
    for (const auto& child : module.named_children())
      if (child.value()) ignore_subtree(*child.value());
  }

  /// is_exempt: the module around it is.
  void visit(Module& module, const std::string& path, bool is_start, bool is_exempt) {
    if (!is_start && roots_.contains(&module)) return;  // its own turn comes
    if (!seen_.insert(&module).second) return;
    if (auto state = find_state(module); state && !is_start) {
      const auto& ignored = state->request().ignored;
      walk_.ignored.insert(ignored.begin(), ignored.end());
      walk_.nested.push_back({std::move(state), &module, path});
      return;
    }
    is_exempt = is_exempt || (walk_.is_exempt && walk_.is_exempt(module));
    if (!leaves_the_walk(module)) walk_.managed.push_back({&module, path, unit_, is_exempt});
    for (const auto& child : module.named_children())
      if (child.value()) visit(*child.value(), join_path(path, child.key()), false, is_exempt);
  }

  /// Named in ignored_modules, or nothing of it is left to manage and it has no buffers.
  bool leaves_the_walk(Module& module) const { return ignored_.contains(&module); }

  std::unordered_set<Module*> roots_, seen_, ignored_;
  size_t unit_ = 0;  // the root that is being walked
  ModuleWalk walk_;
};

}  // namespace

void collect_tree(const Module& module, std::unordered_set<const Module*>& tree) {
  if (!tree.insert(&module).second) return;
  for (const auto& child : module.named_children())
    if (child.value()) collect_tree(*child.value(), tree);
}

void check_ignored_modules(const std::vector<Module*>& roots,
                           const std::vector<std::shared_ptr<Module>>& ignored_modules) {
  if (ignored_modules.empty()) return;
  std::unordered_set<const Module*> tree;
  for (auto* root : roots) collect_tree(*root, tree);
  for (const auto& module : ignored_modules) {
    require(module != nullptr, "ignored_modules: expected modules, found a null pointer");
    const auto name = module->name();
    require(std::find(roots.begin(), roots.end(), module.get()) == roots.end(),
            "ignored_modules: {} is the module that fully_shard was called on; leave the call out, "
            "or name modules below it",
            name);
    require(tree.contains(module.get()),
            "ignored_modules: {} is not in the tree of the module that fully_shard was called on",
            name);
    require(find_state(*module) == nullptr,
            "ignored_modules: {} is sharded already; a sharded unit cannot be ignored", name);
  }
}

IsExempt exempted_by(const MixedPrecisionPolicy& policy) {
  return policy.param_dtype || policy.param_dtype_override ? policy.is_exempt : IsExempt();
}

ModuleWalk walk_modules(const std::vector<Module*>& roots,
                        const std::vector<at::Tensor>& ignored_params,
                        const std::vector<std::shared_ptr<Module>>& ignored_modules, const IsExempt& is_exempt) {
  check_ignored_modules(roots, ignored_modules);
  return Walker(roots, ignored_params, ignored_modules, is_exempt).run(roots);
}

ModuleWalk walk_again(const std::vector<Module*>& roots, const ShardRequest& request) {
  std::vector<std::shared_ptr<Module>> ignored_modules;
  for (const auto& ignored : request.ignored_modules)
    if (auto module = ignored.lock()) ignored_modules.push_back(std::move(module));
  auto walk = Walker(roots, {}, ignored_modules, exempted_by(request.options.mp_policy)).run(roots);
  walk.ignored.insert(request.ignored.begin(), request.ignored.end());
  return walk;
}

}  // namespace fsdp
