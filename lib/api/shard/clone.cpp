#include "fsdp/clone.hpp"

#include <ATen/ATen.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <unordered_map>
#include <unordered_set>

#include "api/params/whole_values.hpp"
#include "api/shard/shard_like.hpp"
#include "api/state_dict/named_states.hpp"
#include "base/require.hpp"
#include "module/attach.hpp"
#include "module/make_groups.hpp"
#include "module/module_access.hpp"
#include "module/module_path.hpp"
#include "module/module_table.hpp"
#include "param/grad_dtype.hpp"

// A copy in two steps: LibTorch's clone() makes the structure, plain and of full size, out of stand-ins;
// then the copy is sharded like the original and takes its shards over.
namespace fsdp {

namespace {

using torch::nn::Module;

/// While it lives, the tables of the tree hold tensors of the full sizes, of one element each, in the
/// place of sharded parameters.
class StandIns {
 public:
  explicit StandIns(Module& module) { visit(module); }
  ~StandIns() {
    for (auto& [module, slot, sharded_param] : replaced_)
      ModuleAccess::parameters(*module)[slot].value() = sharded_param;
  }
  StandIns(const StandIns&) = delete;
  StandIns& operator=(const StandIns&) = delete;

 private:
  struct Replaced {
    Module* module;
    size_t slot;
    at::Tensor sharded_param;
  };
  void visit(Module& module) {
    auto& table = ModuleAccess::parameters(module);
    for (size_t slot = 0; slot < table.size(); ++slot) {
      auto& entry = table[slot].value();
      const auto found = find_param(entry);
      if (!found) continue;
      const auto options = at::TensorOptions().dtype(entry.scalar_type()).device(entry.device());
      auto stand_in = at::zeros({}, options).expand(found->param().spec.sizes());
      replaced_.push_back({&module, slot, std::exchange(entry, std::move(stand_in))});
    }
    for (const auto& child : module.named_children())
      if (child.value()) visit(*child.value());
  }
  std::vector<Replaced> replaced_;
};

std::shared_ptr<Module> clone_plain(Module& module) {
  try {
    StandIns stand_ins(module);
    auto copy = module.clone();
    require(copy != nullptr, "clone: {}'s clone() returned nothing", module.name());
    return copy;
  } catch (const c10::Error& error) {
    throw UsageError(fmt::format("clone: LibTorch's clone() of {} failed: {}. Its class, and those of its "
                                 "submodules, must derive from torch::nn::Cloneable and make their members "
                                 "in reset()",
                                 module.name(), error.what_without_backtrace()));
  }
}

/// A parameter of the original, where the copy has it.
struct CopiedParam {
  at::Tensor original;
  std::optional<FoundParam> param;
  struct Place {
    std::shared_ptr<Module> module;  // of the copy
    size_t slot;
    std::string name;
    at::Tensor& entry() const { return ModuleAccess::parameters(*module)[slot].value(); }
  };
  std::vector<Place> places = {};
};

/// Which tensor and which module of the copy stands for which of the original.
class Pairs {
 public:
  Pairs(const Module& original, const std::shared_ptr<Module>& copy) { visit(original, copy, ""); }

  std::vector<CopiedParam> params;
  std::unordered_map<const Module*, std::shared_ptr<Module>> modules;
  std::unordered_map<const c10::TensorImpl*, at::Tensor> buffers;

 private:
  void visit(const Module& original, const std::shared_ptr<Module>& copy, const std::string& path) {
    const auto [known, is_new] = modules.emplace(&original, copy);
    require(is_new || known->second == copy,
            "clone: the module at '{}' has a second place in the tree, but the copy has another module "
            "there; register one module under both names in reset()",
            path);
    if (!is_new) return;
    visit_parameters(original, copy, path);
    const auto buffers_of_copy = copy->named_buffers(/*recurse=*/false);
    for (const auto& buffer : original.named_buffers(/*recurse=*/false))
      if (const auto* found = buffers_of_copy.find(buffer.key()))
        buffers.emplace(buffer.value().unsafeGetTensorImpl(), *found);
    const auto children = original.named_children(), copies = copy->named_children();
    require(children.size() == copies.size(), "clone: '{}' has {} submodules, its copy {}", path,
            children.size(), copies.size());
    for (const auto& child : children) {
      const auto* found = copies.find(child.key());
      const auto below = join_path(path, child.key());
      require(found != nullptr && (*found == nullptr) == (child.value() == nullptr),
              "clone: the copy has no module '{}'", below);
      if (child.value()) visit(*child.value(), *found, below);
    }
  }

  void visit_parameters(const Module& original, const std::shared_ptr<Module>& copy, const std::string& path) {
    const auto& table = ModuleAccess::parameters(original);
    const auto& copies = ModuleAccess::parameters(*copy);
    for (size_t slot = 0; slot < table.size(); ++slot) {
      const auto name = join_path(path, table[slot].key());
      require(slot < copies.size() && copies[slot].key() == table[slot].key(),
              "clone: the copy has no parameter '{}'", name);
      auto tensor = table[slot].value();
      auto param = find_param(tensor);
      if (!tensor.defined()) {
        const auto tied = find_tied_entry(original, slot);
        if (!tied) continue;
        param = FoundParam{tied->group, tied->param, /*is_unsharded_param=*/false};
        tensor = param->param().sharded_param();
      }
      require(copies[slot].value().defined(), "clone: the copy has no parameter '{}'", name);
      auto& paired = param_of(tensor);
      paired.param = param;
      paired.places.push_back({copy, slot, name});
    }
  }

  CopiedParam& param_of(const at::Tensor& tensor) {
    const auto [known, is_new] = indices_.emplace(tensor.unsafeGetTensorImpl(), params.size());
    if (is_new) params.push_back({.original = tensor, .param = {}});
    return params[known->second];
  }

  std::unordered_map<const c10::TensorImpl*, size_t> indices_;
};

/// The member behind an entry, for classes whose members are known; null for others.
at::Tensor* member_of(Module& module, const std::string& key) {
  if (auto* linear = module.as<torch::nn::LinearImpl>())
    return key == "weight" ? &linear->weight : &linear->bias;
  if (key != "weight") return nullptr;
  if (auto* embedding = module.as<torch::nn::EmbeddingImpl>()) return &embedding->weight;
  if (auto* bag = module.as<torch::nn::EmbeddingBagImpl>()) return &bag->weight;
  return nullptr;
}

/// LibTorch's clone() copies a tensor once for each of its places; here they are one again.
void tie(const CopiedParam& param) {
  const auto& first = param.places.front();
  for (const auto& place : param.places) {
    if (place.entry().is_same(first.entry())) continue;
    auto* member = member_of(*place.module, ModuleAccess::parameters(*place.module)[place.slot].key());
    require(member != nullptr && member->is_same(place.entry()),
            "clone: '{}' and '{}' are one parameter, but two in the copy that LibTorch's clone() makes; "
            "tie them again in CloneOptions::prepare",
            first.name, place.name);
    *member = first.entry();
    place.entry() = first.entry();
  }
}

/// Sizes, strides, dtype, requires_grad and grad_dtype of the original; its values follow where it is not sharded.
void shape_like_original(const CopiedParam& param) {
  auto& copy = param.places.front().entry();
  if (param.param) {
    const auto& original = param.param->param();
    require(copy.sizes() == c10::IntArrayRef(original.spec.sizes()),
            "clone: the copy of '{}' has sizes ({}), expected ({})", param.places.front().name,
            fmt::join(copy.sizes(), ", "), fmt::join(original.spec.sizes(), ", "));
    if (copy.strides() != c10::IntArrayRef(original.spec.strides()))
      copy.set_data(at::empty_strided(original.spec.sizes(), original.spec.strides(),
                                      copy.options().requires_grad(false)).copy_(copy));
  }
  copy.set_requires_grad(param.original.requires_grad());
  set_grad_dtype(copy, grad_dtype_of(param.original));
}

/// Shards the modules that stand for the state's, inner states first.
class ShardLike {
 public:
  explicit ShardLike(const Pairs& pairs) : pairs_(pairs) {}

  /// Throws before anything is sharded.
  void check(const Module& original) {
    for (const auto& root : roots(original))
      root.state().visit([&](ModuleState& state) {
        covered_.insert(&state);
        for (const auto& unit : state.units)
          require(pairs_.modules.contains(unit.module),
                  "clone: {} shares its group with a module outside of it; clone a module around both",
                  original.name());
      });
    for (const auto& param : pairs_.params)
      require(!param.param || covered_.contains(GroupPort::of(*param.param->group).companion().get()),
              "clone: '{}' belongs to a sharded module around {}; clone that one",
              param.places.front().name, original.name());
  }

  void shard(ModuleState& state) const {
    for (const auto& nested : state.nested) shard(*nested);
    auto options = state.options;
    options.reshard_after_forward = state.requested_reshard;
    options.sync_from_rank0 = false;  // the shards are copied from this rank's own
    for (const auto& param : pairs_.params)
      if (state.ignored.contains(param.original.unsafeGetTensorImpl()))
        options.ignored_params.push_back(param.places.front().entry());
    for (const auto& ignored : state.ignored_modules)
      if (const auto module = ignored.lock(); module && pairs_.modules.contains(module.get()))
        options.ignored_modules.push_back(pairs_.modules.at(module.get()));
    std::vector<Module*> modules;
    for (const auto& unit : state.units) modules.push_back(pairs_.modules.at(unit.module).get());
    // The same cut, even where the options would now give another: parameters have been frozen, or
    // converted, since.
    const auto copy = attach(modules, options, &state);
    copy_controls(state, *copy);
  }

 private:
  void copy_controls(const ModuleState& from, ModuleState& to) const {
    to.cast_buffers.clear();  // noted in the dtype that the original's had been cast to
    for (const auto& cast : from.cast_buffers)
      if (const auto buffer = cast.buffer.lock(); buffer.defined())
        if (const auto copy = pairs_.buffers.find(buffer.get()); copy != pairs_.buffers.end())
          to.cast_buffers.emplace_back(copy->second).dtype = cast.dtype;
    to.context->options() = from.context->options();
    to.context->runner().scheduler().options() = from.context->runner().scheduler().options();
    for (const auto& copy : to.live_groups()) {
      const auto group = find_group(from, copy->identity().mesh_info);
      if (!group) continue;
      copy->reduction() = group->reduction();
      copy->gradient_dtypes().plan();
      for (const auto option : {&GroupPolicy::reshard_after_backward, &GroupPolicy::prefetch_in_backward})
        root_of(*copy).set_policy(*copy, option, group->policy().*option);
      copy->unsharder().form().set_custom(copy->parts(), group->unsharder().form().custom());
      copy->set_symmetric_memory(group->has_symmetric_memory());
      copy->unsharder().memory().set_keeps(group->unsharder().memory().keeps());
    }
  }

  const Pairs& pairs_;
  std::unordered_set<const void*> covered_;
};

void copy_shards(const Pairs& pairs) {
  for (const auto& param : pairs.params) {
    if (!param.param) continue;
    const auto entry = param.places.front().entry();
    const auto copy = find_param(entry);
    auto values = plain_view(param.original);
    // A flat run that a tied parameter has left keeps its gap; the copy's has none, so its cuts lie elsewhere.
    // On all ranks alike, for gathering is collective.
    if (copy->param().layout() != param.param->param().layout())
      values = own_values(*copy, gather_values(*param.param->group, param.param->index, values));
    plain_view(entry).copy_(values);
  }
}

}  // namespace

void check_copyable(Module& module) {
  require_not_shown(module, "clone");
  for (const auto& root : roots(module))
    for (const auto* group : root.state().root()->context->groups())
      require_state(!group->config().device.is_meta(),
                    "clone: '{}' is on the meta device and has no values; materialise the module first", group->name());
}

std::shared_ptr<Module> clone(Module& module, const CloneOptions& options) {
  check_copyable(module);
  at::NoGradGuard no_grad;
  auto copy = clone_plain(module);
  if (options.prepare) {
    at::AutoGradMode grad(true);
    options.prepare(*copy);
  }
  shard_like(module, copy);
  return copy;
}

void shard_like(Module& module, const std::shared_ptr<Module>& copy) {
  at::NoGradGuard no_grad;
  const Pairs pairs(module, copy);
  ShardLike like(pairs);
  like.check(module);
  for (const auto& param : pairs.params) tie(param);
  for (const auto& param : pairs.params) shape_like_original(param);
  for (const auto& root : roots(module)) like.shard(root.state());
  copy_shards(pairs);
}

}  // namespace fsdp
