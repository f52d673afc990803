#include "api/shard/shard_like.hpp"

#include <ATen/ATen.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <unordered_set>

#include "api/params/own_rows.hpp"
#include "api/shard/copy_pairs.hpp"
#include "api/state_dict/named_states.hpp"
#include "base/require.hpp"
#include "fsdp/fully_shard.hpp"
#include "group/unsharded_values.hpp"
#include "module/attach.hpp"
#include "module/handles.hpp"
#include "module/module_access.hpp"
#include "param/grad_dtype.hpp"
#include "root/configure.hpp"

namespace fsdp {

namespace {

using torch::nn::Module;

/// The member behind an entry, for classes whose members are known; null for others.
at::Tensor* member_of(Module& module, const std::string& key) {
  if (auto* linear = module.as<torch::nn::LinearImpl>())
    return key == "weight" ? &linear->weight : &linear->bias;
  if (key != "weight") return nullptr;
  if (auto* embedding = module.as<torch::nn::EmbeddingImpl>()) return &embedding->weight;
  if (auto* bag = module.as<torch::nn::EmbeddingBagImpl>()) return &bag->weight;
  return nullptr;
}

/// LibTorch's clone() copies a tensor once for each of its entries; here they are one again.
void tie(const CopiedParam& param) {
  const auto& first = param.entries.front();
  for (const auto& entry : param.entries) {
    if (entry.tensor().is_same(first.tensor())) continue;
    auto* member = member_of(*entry.module, ModuleAccess::parameters(*entry.module)[entry.slot].key());
    require(member != nullptr && member->is_same(entry.tensor()),
            "clone: '{}' and '{}' are one parameter, but two in the copy that LibTorch's clone() makes; "
            "tie them again in CloneOptions::prepare",
            first.name, entry.name);
    *member = first.tensor();
    entry.tensor() = first.tensor();
  }
}

/// Sizes, strides, dtype, requires_grad and grad_dtype of the original; its values follow where it is not sharded.
void shape_like_original(const CopiedParam& param) {
  auto& copy = param.entries.front().tensor();
  if (param.param) {
    const auto& original = param.param->param();
    require(copy.sizes() == c10::IntArrayRef(original.spec.sizes()),
            "clone: the copy of '{}' has sizes ({}), expected ({})", param.entries.front().name,
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
  explicit ShardLike(const CopyPairs& pairs) : pairs_(pairs) {}

  /// Throws before anything is sharded.
  void check(const Module& original) {
    for (const auto& root : roots(original))
      handles::state(root).visit([&](ModuleState& state) {
        covered_.insert(&state);
        for (const auto& unit : state.tree().units())
          require(pairs_.modules.contains(unit.module),
                  "clone: {} shares its group with a module outside of it; clone a module around both",
                  original.name());
      });
    for (const auto& param : pairs_.params)
      require(!param.param || covered_.contains(ModuleState::of(*param.param->group).get()),
              "clone: '{}' belongs to a sharded module around {}; clone that one",
              param.entries.front().name, original.name());
  }

  void shard(ModuleState& state) const {
    for (const auto& nested : state.tree().nested()) shard(*nested);
    const auto& request = state.request();
    auto options = request.options;
    options.sync_from_rank0 = false;  // the shards are copied from this rank's own
    for (const auto& param : pairs_.params)
      if (request.ignored.contains(param.original.unsafeGetTensorImpl()))
        options.ignored_params.push_back(param.entries.front().tensor());
    for (const auto& ignored : request.ignored_modules)
      if (const auto module = ignored.lock(); module && pairs_.modules.contains(module.get()))
        options.ignored_modules.push_back(pairs_.modules.at(module.get()));
    std::vector<Module*> modules;
    for (const auto& unit : state.tree().units()) modules.push_back(pairs_.modules.at(unit.module).get());
    // The same cut, even where the options would now give another: parameters have been frozen, or
    // converted, since.
    const auto copy = attach(modules, options, &state);
    copy_controls(state, *copy);
  }

 private:
  void copy_controls(ModuleState& from, ModuleState& to) const {
    copy_dtypes(from.precision(), to.precision());
    configure(*to.context(), [&](RootContext::Options& options) { options = from.context()->options(); });
    for (const auto& copy : to.live_groups())
      if (const auto group = find_group(from.groups(), copy->identity().mesh_info)) copy_controls(*group, *copy);
  }

  /// The buffers were noted in the dtype that the original's had been cast to.
  void copy_dtypes(const ModulePrecision& from, ModulePrecision& to) const {
    std::vector<CastBuffer> copies;
    for (const auto& cast : from.cast_buffers())
      if (const auto buffer = cast.buffer.lock(); buffer.defined())
        if (const auto copy = pairs_.buffers.find(buffer.get()); copy != pairs_.buffers.end())
          copies.emplace_back(copy->second, cast.dtype);
    to.set_cast_buffers(std::move(copies));
  }

  static void copy_controls(const ParamGroup& from, ParamGroup& to) {
    const auto& known = from.options();
    configure(to, [&](GroupOptions& options) {
      options.reduce = known.reduce;
      options.memory = known.memory;
      options.residency.reshard_after_backward = known.residency.reshard_after_backward;
      options.residency.prefetch_in_backward = known.residency.prefetch_in_backward;
    });
  }

  const CopyPairs& pairs_;
  std::unordered_set<const void*> covered_;
};

void copy_shards(const CopyPairs& pairs) {
  for (const auto& param : pairs.params) {
    if (!param.param) continue;
    const auto entry = param.entries.front().tensor();
    const auto copy = find_param(entry);
    auto values = plain_view(param.original);
    // A flat run that a tied parameter has left keeps its gap; the copy's has none, so its cuts lie elsewhere.
    // On all ranks alike, for gathering is collective.
    if (copy->param().layout() != param.param->param().layout())
      values = own_rows(*copy, unsharded_values(*param.param->group, param.param->index, values));
    plain_view(entry).copy_(values);
  }
}

}  // namespace

void check_copyable(Module& module) {
  require_not_shown(module, "clone");
  for (const auto& root : roots(module))
    for (const auto* group : handles::state(root).root()->context()->runner().groups())
      require_state(!group->parts().config.device.is_meta(),
                    "clone: '{}' is on the meta device and has no values; materialise the module first", group->name());
}

void shard_like(Module& module, const std::shared_ptr<Module>& copy) {
  at::NoGradGuard no_grad;
  const auto pairs = pair_with_copy(module, copy);
  ShardLike like(pairs);
  like.check(module);
  for (const auto& param : pairs.params) tie(param);
  for (const auto& param : pairs.params) shape_like_original(param);
  for (const auto& root : roots(module)) like.shard(handles::state(root));
  copy_shards(pairs);
}

}  // namespace fsdp
