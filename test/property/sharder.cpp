#include "property/sharder.hpp"

#include <algorithm>

namespace fsdp::test {
namespace {

namespace nn = torch::nn;
using Impls = std::map<const c10::TensorImpl*, Where>;

ReshardAfterForward draw_reshard(Draw& draw, const Training& training) {
  std::vector<int64_t> divisors;
  for (int64_t n = 1; n <= training.shard_ranks(); ++n)
    if (training.shard_ranks() % n == 0) divisors.push_back(n);
  switch (draw.number(0, 4)) {
    case 0: return true;
    case 1: return false;
    case 2: return training.replicate_only ? ReshardAfterForward() : ReshardAfterForward(draw.one_of(divisors));
    default: return {};
  }
}

/// LibTorch's containers without a forward cannot be sharded themselves.
bool is_container(const nn::Module& module) {
  return module.as<nn::ModuleList>() || module.as<nn::ParameterList>() || module.as<nn::ParameterDict>();
}

/// One of the layouts, with any dimension for each parameter, whatever its name may be.
void draw_layout(Draw& draw, FullyShardOptions& options) {
  if (draw.chance(0.5)) {
    options.layout = ParamLayout::kFlat;
    if (draw.chance(0.5))
      options.flat_block_numel = [block = draw.number(2, 9)](const std::string&, const at::Tensor&) { return block; };
    return;
  }
  options.shard_placement_fn = [shift = draw.number(0, 7)](const std::string& name, const at::Tensor& parameter) {
    const int64_t dims = std::max<int64_t>(parameter.dim(), 1);
    return Shard{(shift + static_cast<int64_t>(name.size())) % dims};
  };
}

bool is_inside(const nn::Module* module, const nn::Module& around) {
  const auto modules = around.modules();
  return module == &around ||
         std::any_of(modules.begin(), modules.end(), [&](const auto& below) { return below.get() == module; });
}

/// A child of which all parameters are among these.
std::shared_ptr<nn::Module> draw_child(Draw& draw, const nn::Module& module, const std::vector<PlainParam>& params) {
  std::vector<at::Tensor> known;
  for (const auto& param : params) known.push_back(param.tensor);
  std::vector<std::shared_ptr<nn::Module>> fitting;
  for (const auto& child : module.children()) {
    const auto inside = child->parameters();
    if (std::all_of(inside.begin(), inside.end(), [&](const auto& tensor) { return is_among(tensor, known); }))
      fitting.push_back(child);
  }
  return fitting.empty() ? nullptr : draw.one_of(fitting);
}

void collect_registrations(const nn::Module& module,
                           std::map<const c10::TensorImpl*, std::vector<const nn::Module*>>& found) {
  for (const auto& parameter : module.named_parameters(/*recurse=*/false))
    found[parameter.value().unsafeGetTensorImpl()].push_back(&module);
}

}  // namespace

const Slice* Unsharded::find_slice(const at::Tensor& tensor) const {
  const auto found =
      std::find_if(slices.begin(), slices.end(), [&](const Slice& slice) { return slice.tensor.is_same(tensor); });
  return found == slices.end() ? nullptr : &*found;
}

bool Unsharded::is_expert(const at::Tensor& tensor) const {
  const auto* slice = find_slice(tensor);
  return slice != nullptr && slice->is_expert;
}

std::optional<TensorParallel> Unsharded::part_of_whole(const std::string& name, const at::Tensor& parameter,
                                                       Where where) const {
  const auto* slice = find_slice(parameter);
  if (slice != nullptr && slice->is_expert) {
    if (tree.experts_differ) return std::nullopt;
    return TensorParallel{.placements = {Shard{slice->dim}}, .sizes = slice->sizes, .mesh = meshes.expert_ranks};
  }
  if (!meshes.tensor.defined()) return std::nullopt;
  const bool is_known = meshes.dims.has_value() && where == Where::kModule;
  // What is the same on all tensor-parallel ranks may be said to be, or not.
  if (slice == nullptr && (is_known || name.size() % 2 == 0)) return std::nullopt;
  TensorParallel part{.placements = {Replicate{}}, .sizes = parameter.sizes().vec()};
  if (slice != nullptr) part = {.placements = {Shard{slice->dim}}, .sizes = slice->sizes};
  if (where == Where::kOther)
    part.mesh = meshes.tensor_beside_other;
  else if (!is_known)
    part.mesh = meshes.tensor;
  return part;
}

Sharder::Sharder(const nn::Module& model, std::shared_ptr<const Unsharded> unsharded, FullyShardOptions options)
    : unsharded_(std::move(unsharded)), tree_(unsharded_->tree), options_(std::move(options)), draw_(tree_.seed + 6) {
  collect_registrations(model, registering_);
  for (const auto& module : model.modules(/*include_self=*/false)) collect_registrations(*module, registering_);
}

std::vector<PlainGroup> Sharder::groups() const {
  std::vector<PlainGroup> groups;
  for (const auto& owned : owned_) groups.push_back(owned.group);
  return groups;
}

/// What a call of fully_shard on `module` is about to take, in its order.
std::vector<PlainParam> Sharder::left_in(const nn::Module& module, const FullyShardOptions& with) const {
  std::vector<PlainParam> params;
  for (auto& [name, parameter] : unique_parameters(module)) {
    if (is_fsdp_parameter(parameter) || is_among(parameter, with.ignored_params)) continue;
    PlainParam param{.name = name, .tensor = parameter};
    if (with.shard_placement_fn) param.dim = with.shard_placement_fn(name, parameter)->placement.dim;
    if (with.flat_block_numel) param.block = with.flat_block_numel(name, parameter);
    param.stored_itemsize = static_cast<int64_t>(parameter.element_size());
    param.is_trainable = parameter.requires_grad();
    param.itemsize =
        static_cast<int64_t>(c10::elementSize(with.mp_policy.param_dtype.value_or(parameter.scalar_type())));
    params.push_back(std::move(param));
  }
  return params;
}

std::vector<Sharder::Place> Sharder::draw_places(const nn::Module& module, const std::vector<PlainParam>& params,
                                                 FullyShardOptions& with) {
  std::vector<Place> places(params.size());
  std::shared_ptr<nn::Module> whole_child;
  if (tree_.replicated_probability > 0 && draw_.chance(0.3)) whole_child = draw_child(draw_, module, params);
  if (whole_child) with.replicated_modules = {whole_child};
  const auto of_child = whole_child ? whole_child->parameters() : std::vector<at::Tensor>();
  Impls elsewhere;
  for (size_t i = 0; i < params.size(); ++i) {
    const auto& tensor = params[i].tensor;
    auto& place = places[i];
    // A gather is a collective: where ranks choose differently, either choice has to gather the same group.
    const auto& name = params[i].name;
    const bool is_choice = tree_.training.reduce_unused && (name.ends_with("odd") || name.ends_with("even"));
    if (unsharded_->is_expert(tensor))
      place.where = Where::kExperts;
    else if (!is_choice && tree_.other_mesh_probability > 0 && draw_.chance(tree_.other_mesh_probability) &&
             with.layout != ParamLayout::kFlat)
      place.where = Where::kOther;
    elsewhere[tensor.unsafeGetTensorImpl()] = place.where;
    bool is_replicated = is_among(tensor, of_child);
    if (!is_choice && tree_.replicated_probability > 0 && draw_.chance(tree_.replicated_probability)) {
      with.replicated_params.push_back(tensor);
      is_replicated = true;
    }
    // Where nothing is cut, the whole group is replicated.
    place.is_replicated = is_replicated && !tree_.training.replicate_only;
  }
  choose_meshes(elsewhere, with);
  return places;
}

void Sharder::choose_meshes(const Impls& elsewhere, FullyShardOptions& with) const {
  const auto where_of = [elsewhere](const at::Tensor& tensor) {
    const auto found = elsewhere.find(tensor.unsafeGetTensorImpl());
    return found == elsewhere.end() ? Where::kModule : found->second;
  };
  const bool any =
      std::any_of(elsewhere.begin(), elsewhere.end(), [](const auto& one) { return one.second != Where::kModule; });
  const auto& meshes = unsharded_->meshes;
  if (any)
    with.shard_placement_fn = [where_of, meshes, cut = with.shard_placement_fn, differ = tree_.experts_differ](
                                  const std::string& name, const at::Tensor& parameter) {
      auto result = cut ? cut(name, parameter) : ShardPlacementResult();
      const auto where = where_of(parameter);
      if (where != Where::kModule) result->mesh = meshes.own(where);
      if (where == Where::kExperts && differ) result->differs_over = meshes.expert_ranks;
      return result;
    };
  if (meshes.tensor.defined() || !unsharded_->slices.empty())
    // Weak: the options stay with the module, whose parameters `unsharded_` knows.
    with.tensor_parallel_fn = [model = std::weak_ptr(unsharded_), where_of](const std::string& name,
                                                                            const at::Tensor& parameter) {
      return model.lock()->part_of_whole(name, parameter, where_of(parameter));
    };
}

void Sharder::shard(nn::Module& module) {
  const auto& training = tree_.training;
  auto with = options_;
  if (!training.budget_factor) with.reshard_after_forward = draw_reshard(draw_, training);
  if (draw_.chance(tree_.other_layout_probability)) draw_layout(draw_, with);
  for (auto& parameter : module.parameters())
    if (is_among(parameter, unsharded_->ignored)) with.ignored_params.push_back(parameter);
  if (draw_.chance(tree_.offload_probability)) with.offload_policy = CPUOffloadPolicy{};
  auto params = left_in(module, with);
  const auto is_expert = [&](const PlainParam& param) { return unsharded_->is_expert(param.tensor); };
  if (with.layout == ParamLayout::kFlat && std::any_of(params.begin(), params.end(), is_expert)) {
    // The flat layout takes no placement function, which is what sends experts to their mesh.
    with.layout = ParamLayout::kPerParameter;
    with.flat_block_numel = {};
    params = left_in(module, with);
  }
  const auto places = draw_places(module, params, with);
  Groups made;
  group_of({}, with, made);
  for (size_t i = 0; i < params.size(); ++i)
    group_of(places[i], with, made).params.push_back(std::move(params[i]));
  take_ties(module, with, made);
  auto& reshard = with.reshard_after_forward;
  const auto refuses = [&](const auto& one) {
    return !one.first.is_replicated && !one.second.params.empty() && one.second.ranks % reshard.ranks() != 0;
  };
  if (reshard.is_integer() && std::any_of(made.begin(), made.end(), refuses)) reshard = true;
  const auto sharded = fully_shard(module, with);
  for (auto& [place, group] : made) {
    group.module = sharded;
    const auto& mesh = place.where == Where::kModule ? sharded.mesh() : unsharded_->meshes.own(place.where);
    group.gathered_over = mesh.get_group(mesh.ndim() - 1)->name();
    if (reshard.is_integer()) group.ranks_after_forward = reshard.ranks();
    owned_.push_back({&module, place, std::move(group)});
  }
}

PlainGroup Sharder::new_group(const Place& place, const FullyShardOptions& with) const {
  const auto& training = tree_.training;
  PlainGroup group;
  std::vector<std::string> notes;
  if (place.where != Where::kModule) notes = unsharded_->meshes.own(place.where).dim_names();
  if (place.is_replicated) notes.push_back("replicated");
  if (!notes.empty()) group.suffix = fmt::format(" [{}]", fmt::join(notes, ", "));
  group.is_flat = with.layout == ParamLayout::kFlat && !place.is_replicated;
  group.is_offloaded = with.offload_policy.has_value();
  const auto spread = spread_of(tree_, place.where, place.is_replicated);
  group.ranks = spread.ranks;
  group.replicas = spread.replicas;
  group.launches_batches = training.launches_batches;
  group.packs_below = training.packs_below;
  return group;
}

PlainGroup& Sharder::group_of(const Place& place, const FullyShardOptions& with, Groups& made) const {
  if (const auto known = made.find(place); known != made.end()) return known->second;
  return made.emplace(place, new_group(place, with)).first->second;
}

/// A parameter that several modules register goes to the first group around them all, and stays on its mesh.
void Sharder::take_ties(const nn::Module& module, const FullyShardOptions& with, Groups& made) {
  for (auto& owned : owned_) {
    if (!is_inside(owned.owner, module)) continue;
    for (auto& param : owned.group.params) {
      const auto& registering = registering_.at(param.tensor.unsafeGetTensorImpl());
      const auto all_inside = [&](const nn::Module& around) {
        return std::all_of(registering.begin(), registering.end(), [&](const auto* one) { return is_inside(one, around); });
      };
      if (param.is_gone || !all_inside(module) || all_inside(*owned.owner)) continue;
      auto taken = param;
      if (owned.group.is_flat) taken.dim = 0;
      taken.block = with.flat_block_numel ? with.flat_block_numel(taken.name, taken.tensor) : 1;
      group_of(owned.place, with, made).params.push_back(std::move(taken));
      param.is_gone = true;
    }
  }
}

void Sharder::visit(nn::Module& module, bool forced) {
  if (!visited_.insert(&module).second) return;
  const auto* node = dynamic_cast<const Node*>(&module);
  if (node == nullptr || !node->is_one_group() || tree_.splits_ties)
    for (auto& child : module.children()) visit(*child, forced && is_container(module));
  if (!is_container(module) && (forced || draw_.chance(tree_.shard_probability))) shard(module);
}

void Sharder::prefetch_by_list() {
  std::vector<FSDPModule> modules;
  for (const auto& owned : owned_)
    if (owned.place == Place{}) modules.push_back(*owned.group.module);
  for (size_t i = 0; i + 1 < modules.size(); ++i) {
    auto &inner = modules[i], &outer = modules[i + 1];
    if (draw_.chance(0.3)) inner.set_modules_to_forward_prefetch({outer});
    if (draw_.chance(0.3)) outer.set_modules_to_backward_prefetch({inner});
  }
}

}  // namespace fsdp::test
