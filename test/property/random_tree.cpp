#include "property/random_tree.hpp"

#include <functional>
#include <map>
#include <set>

#include "property/byte_formula.hpp"
#include "property/parts.hpp"
#include "property/run_watch.hpp"

namespace fsdp::test {
namespace {

namespace nn = torch::nn;

Part draw_part(Draw& draw, int64_t width, int depth, bool differs_by_rank) {
  Part part;
  bool nests = depth > 0 && draw.chance(0.4);
  part.kind = draw.one_of(nests ? nesting_kinds() : leaf_kinds());
  part.width = width;
  part.inner = draw.number(1, 9);
  part.flag = draw.chance(0.5);
  part.differs_by_rank = differs_by_rank;
  if (nests) {
    int64_t count = part.kind == "sequence" ? draw.number(1, 3) : 1;
    for (int64_t i = 0; i < count; ++i) {
      part.parts.push_back(draw_part(draw, width, depth - 1, differs_by_rank));
      if (part.kind == "sequence" && draw.chance(0.2)) part.parts.back().skip_period = draw.number(2, 3);
    }
  }
  return part;
}

bool contains(const Part& part, const std::function<bool(const Part&)>& wanted) {
  if (wanted(part)) return true;
  for (auto& inner : part.parts)
    if (contains(inner, wanted)) return true;
  return false;
}

/// Norms divide by what may be small: in float their rounding grows beyond any fixed tolerance.
bool normalises(const Part& part) {
  static const std::set<std::string> kinds{"norm", "attention", "around", "conv1d", "conv2d"};
  return kinds.count(part.kind) > 0;
}

bool may_be_skipped(const Part& part) { return part.skip_period > 0; }
bool chooses(const Part& part) { return part.kind == "choice"; }

void draw_mesh(Draw& draw, Training& training) {
  training.world_size = static_cast<int>(draw.one_of<int64_t>({1, 2, 2, 2, 3, 3, 4, 4, 4, 5, 6, 7, 8}));
  if (draw.chance(0.1)) {
    training.replicate_only = true;
  } else if (draw.chance(0.35)) {
    std::vector<int> divisors;
    for (int n = 1; n <= training.world_size; ++n)
      if (training.world_size % n == 0) divisors.push_back(n);
    training.replicas = draw.one_of(divisors);
  }
}

Accumulation draw_accumulation(Draw& draw, const Training& training) {
  std::vector<Accumulation> forms{Accumulation::kReduceEach, Accumulation::kSyncAtLast, Accumulation::kLastBackward};
  if (training.replicas > 0) forms.push_back(Accumulation::kAllReduceLast);
  return draw.one_of(forms);
}

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

/// Compute in float what is kept in double. Sums are added up in either.
void draw_policy(Draw& draw, Training& training) {
  training.param_dtype = at::kFloat;
  if (draw.chance(0.7)) training.reduce_dtype = draw.one_of<at::ScalarType>({at::kFloat, at::kDouble});
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

bool is_among(const at::Tensor& tensor, const std::vector<at::Tensor>& tensors) {
  return std::any_of(tensors.begin(), tensors.end(), [&](const auto& known) { return known.is_same(tensor); });
}

/// What a call of fully_shard on `module` is about to take, in its order.
std::vector<PlainParam> left_in(const nn::Module& module, const FullyShardOptions& options) {
  std::vector<PlainParam> params;
  for (auto& [name, parameter] : unique_parameters(module)) {
    if (is_fsdp_parameter(parameter) || is_among(parameter, options.ignored_params)) continue;
    PlainParam param{.name = name, .tensor = parameter};
    if (options.shard_placement_fn) param.dim = options.shard_placement_fn(name, parameter)->placement.dim;
    if (options.flat_block_numel) param.block = options.flat_block_numel(name, parameter);
    param.stored_itemsize = static_cast<int64_t>(parameter.element_size());
    param.itemsize = static_cast<int64_t>(
        c10::elementSize(options.mp_policy.param_dtype.value_or(parameter.scalar_type())));
    params.push_back(std::move(param));
  }
  return params;
}

struct Sharder {
  const RandomTree& tree;
  const FullyShardOptions& options;
  const std::vector<at::Tensor>& ignored;
  Draw draw;
  std::set<const nn::Module*> visited;
  std::vector<PlainGroup>& groups;
  std::map<const c10::TensorImpl*, std::vector<const nn::Module*>> registering;  ///< before anything is sharded
  std::vector<const nn::Module*> owners = {};                                    ///< by group

  void shard(nn::Module& module) {
    auto with = options;
    if (!tree.training.budget_factor) with.reshard_after_forward = draw_reshard(draw, tree.training);
    if (draw.chance(tree.other_layout_probability)) draw_layout(draw, with);
    for (auto& parameter : module.parameters())
      if (is_among(parameter, ignored)) with.ignored_params.push_back(parameter);
    if (draw.chance(tree.offload_probability)) with.offload_policy = CPUOffloadPolicy{};
    auto params = left_in(module, with);
    PlainGroup group{.module = fully_shard(module, with), .params = std::move(params)};
    const auto& training = tree.training;
    group.is_flat = with.layout == ParamLayout::kFlat;
    group.is_offloaded = with.offload_policy.has_value();
    take_ties(module, with, group);
    group.ranks = training.shard_ranks();
    group.replicas = training.world_size / group.ranks;
    if (with.reshard_after_forward.is_integer()) group.ranks_after_forward = with.reshard_after_forward.ranks();
    group.launches_batches = training.launches_batches;
    group.packs_below = training.packs_below;
    group.reduce_itemsize =
        static_cast<int64_t>(c10::elementSize(training.reduce_dtype.value_or(training.param_dtype.value_or(training.dtype))));
    groups.push_back(std::move(group));
    owners.push_back(&module);
  }

  /// A parameter that several modules register goes to the first group around them all.
  void take_ties(nn::Module& module, const FullyShardOptions& with, PlainGroup& group) {
    for (size_t g = 0; g < groups.size(); ++g) {
      if (!is_inside(owners[g], module)) continue;
      for (auto& param : groups[g].params) {
        const auto& places = registering.at(param.tensor.unsafeGetTensorImpl());
        const auto all_inside = [&](const nn::Module& around) {
          return std::all_of(places.begin(), places.end(), [&](const auto* place) { return is_inside(place, around); });
        };
        if (param.is_gone || !all_inside(module) || all_inside(*owners[g])) continue;
        auto taken = param;
        if (groups[g].is_flat) taken.dim = 0;
        taken.block = with.flat_block_numel ? with.flat_block_numel(taken.name, taken.tensor) : 1;
        group.params.push_back(std::move(taken));
        param.is_gone = true;
      }
    }
  }

  static bool is_inside(const nn::Module* module, const nn::Module& around) {
    const auto modules = around.modules();
    return module == &around ||
           std::any_of(modules.begin(), modules.end(), [&](const auto& below) { return below.get() == module; });
  }

  /// Inner modules first; `forced` where an unsharded root would leave parameters without an owner.
  void visit(nn::Module& module, bool forced) {
    if (!visited.insert(&module).second) return;
    const auto* node = dynamic_cast<const Node*>(&module);
    if (node == nullptr || !node->is_one_group() || tree.splits_ties)
      for (auto& child : module.children()) visit(*child, forced && is_container(module));
    if (!is_container(module) && (forced || draw.chance(tree.shard_probability))) shard(module);
  }
};

struct Model : nn::Module {
  explicit Model(const Part& part) {
    body = register_module("body", build_part(part));
    out = register_module("out", nn::Linear(part.width, 2));
  }
  at::Tensor loss(Inputs& in, int64_t width) {
    auto y = out->forward(body->run(in.normal({2, 3, width}), in));
    return (y * in.normal({2, 3, 2})).mean() + y.square().mean();
  }
  std::shared_ptr<Node> body;
  nn::Linear out{nullptr};
};

std::map<const c10::TensorImpl*, std::vector<const nn::Module*>> registrations(const nn::Module& model) {
  std::map<const c10::TensorImpl*, std::vector<const nn::Module*>> found;
  for (const auto& parameter : model.named_parameters(/*recurse=*/false))
    found[parameter.value().unsafeGetTensorImpl()].push_back(&model);
  for (const auto& module : model.modules(/*include_self=*/false))
    for (const auto& parameter : module->named_parameters(/*recurse=*/false))
      found[parameter.value().unsafeGetTensorImpl()].push_back(module.get());
  return found;
}

void prefetch_by_list(Draw& draw, std::vector<PlainGroup>& groups) {
  for (size_t i = 0; i + 1 < groups.size(); ++i) {
    auto &inner = groups[i].module, &outer = groups[i + 1].module;
    if (draw.chance(0.3)) inner.set_modules_to_forward_prefetch({outer});
    if (draw.chance(0.3)) outer.set_modules_to_backward_prefetch({inner});
  }
}

}  // namespace

RandomTree draw_tree(uint64_t seed) {
  Draw draw(seed * 7919 + 13);
  RandomTree tree;
  tree.seed = seed;
  auto& training = tree.training;
  draw_mesh(draw, training);
  training.seed = seed + 1;
  training.steps = static_cast<int>(draw.number(2, 4));
  training.micro_batches = draw.chance(0.35) ? static_cast<int>(draw.number(2, 3)) : 1;
  training.accumulation = draw_accumulation(draw, training);
  training.prefetch_distance = static_cast<int>(draw.one_of<int64_t>({0, 1, 1, 2}));
  if (draw.chance(0.4)) training.max_norm = 0.05;
  training.launches_batches = draw.chance(0.5);
  training.packs_below = draw.one_of<int64_t>({0, 64, 200});
  tree.root_is_sharded = draw.chance(0.85);
  training.reduce_unused = training.world_size > 1 && tree.root_is_sharded && draw.chance(0.25);
  // float shows what users see, double separates rounding from mistakes
  training.dtype = draw.chance(0.3) ? at::kFloat : at::kDouble;
  int64_t width = training.dtype == at::kFloat ? draw.number(4, 8) : draw.number(2, 9);

  tree.shard_probability = draw.one_of<double>({0.0, 0.2, 0.5, 0.9});
  tree.frozen_probability = draw.chance(0.3) ? 0.2 : 0;
  tree.explicit_prefetch = draw.chance(0.15);
  tree.other_layout_probability = draw.one_of<double>({0.0, 0.3, 1.0});
  if (draw.chance(0.25)) training.budget_factor = draw.one_of<double>({1.0, 1.5, 2.5, 6.0});
  if (draw.chance(0.2)) tree.offload_probability = draw.one_of<double>({0.4, 1.0});
  tree.splits_ties = draw.chance(0.6);
  tree.root.kind = "sequence";
  tree.root.width = width;
  for (int64_t i = draw.number(1, 4); i > 0; --i) {
    tree.root.parts.push_back(draw_part(draw, width, 2, training.reduce_unused));
    if (draw.chance(0.15)) tree.root.parts.back().skip_period = draw.number(2, 3);
  }
  const bool is_delicate = contains(tree.root, normalises);
  if (is_delicate) training.dtype = at::kDouble;
  if (!is_delicate && training.dtype == at::kDouble && draw.chance(0.4)) draw_policy(draw, training);
  // Nobody casts the operands of what is ignored.
  if (!training.param_dtype && draw.chance(0.2)) tree.ignored_probability = draw.one_of<double>({0.1, 0.5});
  // A root hears only of backwards that reach it: one that is left out of the last micro-batch
  // would keep what it was told to hold back.
  // A part that chooses among frozen parameters leaves one out, too.
  const bool may_miss_last =
      contains(tree.root, may_be_skipped) || (tree.frozen_probability > 0 && contains(tree.root, chooses));
  if (!tree.root_is_sharded && may_miss_last) training.accumulation = Accumulation::kReduceEach;
  return tree;
}

Workload build(const RandomTree& tree) {
  auto model = std::make_shared<Model>(tree.root);
  Draw draw(tree.seed + 5);
  std::vector<at::Tensor> ignored;
  for (auto& [name, parameter] : unique_parameters(*model->body)) {
    // What a list or dict hands out is the registered parameter: frozen, and with a batch that needs
    // no gradient, no operator records autograd on it, so it is the shard (T20).
    bool in_container = name.find("list.") != std::string::npos || name.find("dict.") != std::string::npos;
    // Where ranks choose differently, a frozen choice would cut the graph on some ranks only, and with
    // it what the parts in front of it gather in backward.
    bool is_choice = tree.training.reduce_unused && (name.ends_with(".odd") || name.ends_with(".even"));
    if (!in_container && !is_choice && draw.chance(tree.frozen_probability)) parameter.set_requires_grad(false);
    if (!in_container && !is_choice && draw.chance(tree.ignored_probability)) ignored.push_back(parameter);
  }
  auto groups = std::make_shared<std::vector<PlainGroup>>();
  auto shard = [model, tree, ignored, groups](const FullyShardOptions& options) {
    Sharder sharder{tree, options, ignored, Draw(tree.seed + 6), {}, *groups, registrations(*model)};
    bool everything = !tree.root_is_sharded;
    sharder.visit(*model->out, everything);
    sharder.visit(*model->body, everything);
    if (tree.root_is_sharded) sharder.shard(*model);
    if (tree.explicit_prefetch) prefetch_by_list(sharder.draw, *groups);
    use_checkpoints(*model->body);  // the plain model keeps its activations
  };
  return {.module = model, .shard = shard, .loss = [model, width = tree.root.width](Inputs& in) {
            return model->loss(in, width);
          },
          .watch = [model, groups, training = tree.training](Rank& rank) {
            return watch_run(rank, model, groups, training);
          }};
}

namespace {

std::string describe(const Part& part) {
  std::string text = fmt::format("{}({}", part.kind, part.inner);
  if (part.flag) text += "+";
  if (part.skip_period) text += fmt::format(" skipped each {}", part.skip_period);
  for (auto& inner : part.parts) text += " " + describe(inner);
  return text + ")";
}

}  // namespace

std::string describe(const RandomTree& tree) {
  auto& t = tree.training;
  const auto name_of = [](std::optional<at::ScalarType> dtype) { return dtype ? c10::toString(*dtype) : "own"; };
  return fmt::format(
      "world {} replicas {}{} width {} {}\nsteps {} micro-batches {} accumulation {} prefetch {}{} max norm {}{}{}\n"
      "sharded with probability {}, root {}, frozen with probability {}, ignored with {}, other layouts with {}, "
      "budget {}, offloaded with {}{}\ncomputed in {}, reduced in {}\n{}",
      t.world_size, t.replicas, t.replicate_only ? " replicate-only" : "", tree.root.width, c10::toString(t.dtype), t.steps,
      t.micro_batches, static_cast<int>(t.accumulation), t.prefetch_distance, tree.explicit_prefetch ? " and lists" : "",
      t.max_norm.value_or(0), t.reduce_unused ? " reduce_scatter_unused_params" : "",
      t.launches_batches ? fmt::format(" batched launches of pieces from {} bytes", t.packs_below) : "", tree.shard_probability, tree.root_is_sharded, tree.frozen_probability,
      tree.ignored_probability, tree.other_layout_probability, t.budget_factor.value_or(0), tree.offload_probability, tree.splits_ties ? ", ties split" : "", name_of(t.param_dtype),
      name_of(t.reduce_dtype), describe(tree.root));
}

}  // namespace fsdp::test
