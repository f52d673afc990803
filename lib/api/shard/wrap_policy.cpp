#include "fsdp/wrap_policy.hpp"

#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>

#include <unordered_map>
#include <unordered_set>

#include "base/log.hpp"
#include "base/require.hpp"
#include "group/notes/frozen_mixture.hpp"
#include "module/module_access.hpp"
#include "module/module_path.hpp"
#include "module/module_walk.hpp"
#include "module/refuse_container.hpp"

namespace fsdp {

namespace {

using torch::nn::Module;

std::string shown(const std::string& name) { return name.empty() ? "the root" : "'" + name + "'"; }

/// The innermost unit around `unit`; null for the root. Inner units stand before outer ones.
const PlannedUnit* parent_of(const WrapPlan& plan, const PlannedUnit& unit) {
  for (const auto* other = &unit + 1; other < plan.units.data() + plan.units.size(); ++other)
    if (other->name.empty() || unit.name.starts_with(other->name + ".")) return other;
  return nullptr;
}

class WrapPlanner {
 public:
  WrapPlanner(const WrapPolicy& policy, const FullyShardOptions& options)
      : policy_(policy), options_(options), is_exempt_(exempted_by(options.mp_policy)) {}

  WrapPlan run(Module& root) {
    require_unsharded(root, "");
    check_ignored_modules({&root}, options_.ignored_modules);
    ignore(options_);
    for (const auto& module : options_.ignored_modules) collect_tree(*module, left_alone_);
    visit(root, "", {.is_root = true});
    assign(root);
    return std::move(plan_);
  }

 private:
  void require_unsharded(Module& module, const std::string& path) {
    require(!find_fsdp_module(module),
            "wrap policy: {} is sharded already; a policy needs a tree without sharded modules",
            shown(path));
    for (const auto& child : module.named_children())
      if (child.value()) require_unsharded(*child.value(), join_path(path, child.key()));
  }

  /// What is around a module.
  struct Surroundings {
    bool is_root = false;
    bool is_asked = true;    // the policy looks below all modules around it
    bool is_exempt = false;  // from mixed precision is one around it
  };

  /// Plans the units of the module's subtree; returns how many elements they took.
  int64_t visit(Module& module, const std::string& path, const Surroundings& around) {
    if (left_alone_.contains(&module) || !seen_.insert(&module).second) return 0;
    const int64_t numel = numel_of(module);
    const bool is_exempt = is_exempt_ && is_exempt_(module) && !is_container(module);
    Surroundings below{.is_root = false, .is_asked = around.is_asked, .is_exempt = around.is_exempt || is_exempt};
    if (below.is_asked && policy_.enters) below.is_asked = policy_.enters(WrapCandidate{module, path, numel, around.is_root});
    int64_t taken = 0;
    if (below.is_asked || is_exempt_)
      for (const auto& child : module.named_children())
        if (child.value()) taken += visit(*child.value(), join_path(path, child.key()), below);
    auto options = options_of(WrapCandidate{module, path, numel - taken, around.is_root}, around, is_exempt);
    if (!options) return taken;
    if (!around.is_root) refuse_container(module);
    add_unit(module, path, std::move(*options), below.is_exempt);
    return numel;
  }

  /// Of a module that is to be a unit.
  std::optional<FullyShardOptions> options_of(const WrapCandidate& candidate, const Surroundings& around,
                                              bool is_exempt) const {
    if (candidate.is_root) return options_;
    auto options = around.is_asked && policy_.wraps ? policy_.wraps(candidate, options_) : std::nullopt;
    if (!options && is_exempt && candidate.numel > 0) options = options_;
    if (!options) return std::nullopt;
    // What is below an exempt module is exempt, which a call for it alone could not tell.
    if (around.is_exempt) options->mp_policy.is_exempt = [](const Module&) { return true; };
    return options_within(candidate.module, std::move(*options));
  }

  void add_unit(Module& module, const std::string& path, FullyShardOptions options, bool is_exempt) {
    auto& unit = plan_.units.emplace_back();
    unit.module = &module;
    unit.name = path;
    unit.options = std::move(options);
    unit.is_exempt = is_exempt;
    ignore(unit.options);  // as the units around it will do
    claim(module, path);
  }

  void ignore(const FullyShardOptions& options) {
    for (const auto& param : options.ignored_params) ignored_.insert(param.unsafeGetTensorImpl());
    for (const auto& module : options.ignored_modules)
      for (const auto& param : module ? module->parameters() : std::vector<at::Tensor>{})
        ignored_.insert(param.unsafeGetTensorImpl());
  }

  /// Of what the root's call ignores, a unit's call may name what is in the unit alone. A parameter of it that the unit has,
  /// too, is ignored there by itself.
  FullyShardOptions options_within(const Module& module, FullyShardOptions options) const {
    std::unordered_set<const Module*> inside;
    collect_tree(module, inside);
    std::erase_if(options.ignored_modules, [&](const auto& ignored) {
      return left_alone_.contains(ignored.get()) && !inside.contains(ignored.get());
    });
    for (const auto& param : module.parameters())
      if (ignored_.contains(param.unsafeGetTensorImpl())) options.ignored_params.push_back(param);
    return options;
  }

  int64_t numel_of(Module& module) const {
    int64_t numel = 0;
    std::unordered_set<const c10::TensorImpl*> counted;
    for (const auto& param : module.parameters())
      if (!ignored_.contains(param.unsafeGetTensorImpl()) &&
          counted.insert(param.unsafeGetTensorImpl()).second)
        numel += param.numel();
    return numel;
  }

  /// The parameters of the subtree that no unit below has.
  void claim(Module& module, const std::string& path) {
    for (const auto& entry : module.named_parameters()) {
      const auto& param = entry.value();
      const auto* impl = param.unsafeGetTensorImpl();
      if (!ignored_.contains(impl) && claimed_.insert(impl).second)
        claims_.push_back({param, join_path(path, entry.key()), plan_.units.size() - 1});
    }
  }

  /// Lists every parameter with its unit. One that is registered outside of the unit that has claimed it
  /// goes to the nearest one around all its places, as fully_shard will have it.
  void assign(Module& root) {
    std::vector<Counts> inside;
    for (const auto& unit : plan_.units) inside.push_back(registrations(*unit.module));
    for (auto& claim : claims_) {
      const auto* impl = claim.param.unsafeGetTensorImpl();
      const size_t everywhere = inside.back().at(impl);  // the root is the last
      if (inside[claim.unit].at(impl) != everywhere) claim.name = name_of(root, impl);
      while (inside[claim.unit].at(impl) != everywhere)
        claim.unit = static_cast<size_t>(parent_of(plan_, plan_.units[claim.unit]) - plan_.units.data());
      auto& unit = plan_.units[claim.unit];
      const auto bytes = static_cast<int64_t>(claim.param.nbytes());
      unit.parameters.push_back(claim.name);
      unit.bytes += bytes;
      if (claim.param.requires_grad()) continue;
      unit.frozen_bytes += bytes;
      unit.frozen_parameters.push_back(claim.name);
    }
  }

  /// In how many places of the subtree each parameter is registered.
  using Counts = std::unordered_map<const c10::TensorImpl*, size_t>;
  static Counts registrations(Module& module) {
    Counts counts;
    std::unordered_set<const Module*> seen;
    count(module, counts, seen);
    return counts;
  }
  static void count(Module& module, Counts& counts, std::unordered_set<const Module*>& seen) {
    if (!seen.insert(&module).second) return;
    for (const auto& param : ModuleAccess::parameters(module))
      if (param.value().defined()) ++counts[param.value().unsafeGetTensorImpl()];
    for (const auto& child : module.named_children())
      if (child.value()) count(*child.value(), counts, seen);
  }
  static std::string name_of(Module& root, const c10::TensorImpl* impl) {
    for (const auto& entry : root.named_parameters())
      if (entry.value().unsafeGetTensorImpl() == impl) return entry.key();
    return "";
  }

  const WrapPolicy& policy_;
  const FullyShardOptions& options_;
  IsExempt is_exempt_;
  std::unordered_set<const Module*> seen_, left_alone_;  // ignored modules, with all below them
  struct Claim {
    at::Tensor param;
    std::string name;
    size_t unit;
  };
  std::unordered_set<const c10::TensorImpl*> ignored_, claimed_;
  std::vector<Claim> claims_;
  WrapPlan plan_;
};

FrozenMixture mixture_of(const PlannedUnit& unit) {
  FrozenMixture mixture{.frozen = {unit.frozen_bytes, unit.frozen_parameters},
                        .trainable = {unit.bytes - unit.frozen_bytes, {}}};
  const std::unordered_set<std::string> frozen(unit.frozen_parameters.begin(), unit.frozen_parameters.end());
  for (const auto& name : unit.parameters)
    if (!frozen.contains(name)) mixture.trainable.names.push_back(name);
  return mixture;
}

void print_tree(const WrapPlan& plan, const PlannedUnit& unit, int depth, std::string& text) {
  const std::string indent(2 * depth, ' ');
  text += fmt::format("{}{}: {} parameters, {} bytes\n", indent,
                      unit.name.empty() ? "(root)" : unit.name, unit.parameters.size(), unit.bytes);
  if (unit.is_exempt) text += fmt::format("{}  note: exempt from mixed precision\n", indent);
  if (unit.frozen_bytes > 0 && unit.frozen_bytes < unit.bytes)
    text += fmt::format("{}  note: {} of these bytes are frozen; they are gathered with the others "
                        "and take no part in the reduction\n"
                        "{}  {}\n",
                        indent, unit.frozen_bytes, indent, mixture_of(unit).to_string());
  for (const auto& below : plan.units)
    if (parent_of(plan, below) == &unit) print_tree(plan, below, depth + 1, text);
}

bool is_attention(const Module& module) {
  return dynamic_cast<const torch::nn::MultiheadAttentionImpl*>(&module) != nullptr;
}

bool is_list_or_dict(const Module& module) {
  return dynamic_cast<const torch::nn::ModuleListImpl*>(&module) != nullptr ||
         dynamic_cast<const torch::nn::ModuleDictImpl*>(&module) != nullptr;
}

}  // namespace

WrapPolicy wrap_if(std::function<bool(const WrapCandidate&)> predicate) {
  return {.wraps = [predicate = std::move(predicate)](
                       const WrapCandidate& candidate,
                       const FullyShardOptions& defaults) -> std::optional<FullyShardOptions> {
    if (!predicate(candidate)) return std::nullopt;
    return defaults;
  }};
}

WrapPolicy wrap_by_size(const WrapBySizeOptions& options) {
  require(options.min_numel > 0, "wrap_by_size: expected a min_numel above 0, found {}",
          options.min_numel);
  const auto is_leaf = options.is_leaf ? options.is_leaf : &is_attention;
  const auto is_excluded = options.is_excluded ? options.is_excluded : &is_list_or_dict;
  const auto enters = [least = options.min_numel, is_leaf](const WrapCandidate& candidate) {
    return candidate.numel >= least && !is_leaf(candidate.module);
  };
  auto policy = wrap_if([enters, is_excluded](const WrapCandidate& candidate) {
    return enters(candidate) && !is_container(candidate.module) && !is_excluded(candidate.module);
  });
  policy.enters = enters;
  return policy;
}

std::string WrapPlan::to_string() const {
  std::string text;
  for (const auto& unit : units)
    if (parent_of(*this, unit) == nullptr) print_tree(*this, unit, 0, text);
  return text;
}

WrapPlan plan_wrapping(Module& root, const WrapPolicy& policy, const FullyShardOptions& options) {
  return WrapPlanner(policy, options).run(root);
}

FSDPModule apply_wrapping(const WrapPlan& plan) {
  require(!plan.units.empty(), "apply_wrapping: expected a plan with a root, found an empty one");
  if (plan.units.size() == 1)
    warn_once("apply_wrapping: the policy chose no module below the root, so all parameters are one group, which is gathered "
              "whole; plan_wrapping(root, policy).to_string() shows the plan");
  std::optional<FSDPModule> root;
  for (const auto& unit : plan.units) root = fully_shard(*unit.module, unit.options);
  return *root;
}

FSDPModule fully_shard(Module& root, const WrapPolicy& policy, const FullyShardOptions& options) {
  return apply_wrapping(plan_wrapping(root, policy, options));
}

}  // namespace fsdp
