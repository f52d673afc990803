#include <set>

#include "property/grad_dtypes.hpp"
#include "property/parallel_parts.hpp"
#include "property/parts.hpp"
#include "property/run_watch.hpp"
#include "property/sharder.hpp"

namespace fsdp::test {
namespace {

namespace nn = torch::nn;

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

bool may_be_frozen(const RandomTree& tree, const std::string& name) {
  // What a list or dict hands out is the sharded parameter: frozen, and with a batch that needs
  // no gradient, no operator records autograd on it, so it is the shard.
  const bool in_container = name.find("list.") != std::string::npos || name.find("dict.") != std::string::npos;
  // Where ranks choose differently, a frozen choice would cut the graph on some ranks only, and with
  // it what the parts in front of it gather in backward.
  const bool is_choice = tree.training.reduce_unused && (name.ends_with(".odd") || name.ends_with(".even"));
  return !in_container && !is_choice;
}

std::vector<at::Tensor> tensors_of_slices(const nn::Module& body) {
  std::vector<at::Tensor> cut;
  for (const auto& part : sliced_parts(body))
    for (auto& slice : part->slices()) cut.push_back(std::move(slice.tensor));
  return cut;
}

/// Freezes some parameters, and returns those to be ignored.
std::vector<at::Tensor> draw_exceptions(const RandomTree& tree, const nn::Module& body) {
  Draw draw(tree.seed + 5);
  const auto cut = tensors_of_slices(body);
  std::vector<at::Tensor> ignored;
  for (auto& [name, parameter] : unique_parameters(body)) {
    if (!may_be_frozen(tree, name)) continue;
    if (draw.chance(tree.frozen_probability)) parameter.set_requires_grad(false);
    // What is ignored is compared as the plain model has it, which is whole.
    if (draw.chance(tree.ignored_probability) && !is_among(parameter, cut)) ignored.push_back(parameter);
  }
  return ignored;
}

/// Parameters that are frozen and thawed together.
struct Toggle {
  By by;
  std::vector<std::string> names = {};
  std::vector<at::Tensor> members = {};
  std::vector<bool> is_trainable = {};  ///< by step
};

/// Of one parameter each, or of all that a module has.
std::vector<Toggle> draw_toggles(const RandomTree& tree, const nn::Module& body) {
  Draw draw(tree.seed * 7 + 9);
  std::vector<Toggle> toggles;
  if (tree.toggled_probability == 0) return toggles;
  std::vector<at::Tensor> taken;
  const auto all = unique_parameters(body);
  const auto add = [&](const std::vector<at::Tensor>& together) {
    Toggle toggle{.by = draw.chance(0.7) ? By::kSharded : By::kMember};
    for (const auto& [name, parameter] : all) {
      if (!is_among(parameter, together) || is_among(parameter, taken)) continue;
      if (!may_be_frozen(tree, name) || !parameter.requires_grad()) continue;
      toggle.names.push_back(name);
      toggle.members.push_back(parameter);
      taken.push_back(parameter);
    }
    for (int step = 0; step < tree.training.steps; ++step) toggle.is_trainable.push_back(draw.chance(0.5));
    if (!toggle.names.empty()) toggles.push_back(std::move(toggle));
  };
  for (const auto& module : body.modules(/*include_self=*/false))
    if (draw.chance(tree.toggled_probability / 3)) add(module->parameters());
  for (const auto& [name, parameter] : all)
    if (draw.chance(tree.toggled_probability)) add({parameter});
  return toggles;
}

/// By step: before which toggle the model is evaluated, with autograd on and no backward behind it; -1: it is not.
std::vector<int64_t> draw_evaluations(const RandomTree& tree, size_t toggles) {
  Draw draw(tree.seed * 7 + 13);
  std::vector<int64_t> places;
  for (int step = 0; step < tree.training.steps; ++step)
    places.push_back(draw.chance(tree.evaluated_probability) ? draw.number(0, static_cast<int64_t>(toggles)) : -1);
  return places;
}

/// In eval mode, which leaves statistics as they are; all ranks on one batch.
void evaluate(Model& model, const RandomTree& tree, int step) {
  const auto& training = tree.training;
  Inputs inputs(/*rank=*/0, step, /*micro_batch=*/0, training.dtype, training.param_dtype);
  model.eval();
  model.loss(inputs, tree.root.width);
  model.train();
}

/// A user's gradient hook on a sharded parameter: gradients are scaled by a number, or by one that comes of the
/// whole parameter, which the hook reads.
struct Hook {
  std::string name;
  at::Tensor member;
  bool reads;

  double factor() const {
    if (!reads) return 0.5;
    at::NoGradGuard no_grad;
    return 1 + 0.1 * std::tanh(member.sum(at::kDouble).item<double>());
  }
};

std::vector<Hook> draw_hooks(const RandomTree& tree, const nn::Module& body, const std::vector<at::Tensor>& ignored) {
  Draw draw(tree.seed * 7 + 10);
  std::vector<Hook> hooks;
  const auto cut = tensors_of_slices(body);  // a rank reads its part of those alone
  for (const auto& [name, parameter] : unique_parameters(body))
    if (draw.chance(tree.hooked_probability) && parameter.requires_grad() && !is_among(parameter, ignored) &&
        !is_among(parameter, cut))
      hooks.push_back({.name = name, .member = parameter, .reads = draw.chance(0.5)});
  return hooks;
}

void register_hooks(const Rank& rank, const nn::Module& body, const std::vector<Hook>& hooks) {
  const auto registered = unique_parameters(body);
  for (const auto& hook : hooks)
    for (const auto& [name, parameter] : registered)
      if (name == hook.name)
        parameter.register_hook([&rank, hook, sizes = parameter.sizes().vec()](const at::Tensor& gradient) {
          rank.check_equal(gradient.sizes().vec(), sizes, "sizes that a hook sees of " + hook.name);
          return gradient * hook.factor();
        });
}

/// Makes the model this rank's part of the plain one.
void cut_parts(const nn::Module& model, Unsharded& unsharded) {
  const auto& meshes = unsharded.meshes;
  for (const auto& part : sliced_parts(model)) {
    auto slices = part->slices();
    for (auto& slice : slices) slice.sizes = slice.tensor.sizes().vec();
    const auto& over = slices.front().is_expert ? meshes.expert_ranks : meshes.tensor;
    part->cut(over.get_local_rank(), over.size(), over.get_group().get());
    std::move(slices.begin(), slices.end(), std::back_inserter(unsharded.slices));
  }
}

/// What of the plain model's tensor this rank's parameter holds: by sizes, ranks and what was drawn alone.
at::Tensor own_part(const Rank& rank, const Unsharded& unsharded, const std::vector<PlainGroup>& groups,
                    const at::Tensor& handle, const at::Tensor& whole) {
  const auto& training = unsharded.tree.training;
  const int64_t place = rank.index() / training.tensor_ranks;
  auto part = whole;
  if (const auto* slice = unsharded.find_slice(handle)) {
    const int64_t experts = unsharded.tree.expert_ranks, tensor_rank = rank.index() % training.tensor_ranks;
    part = slice->is_expert ? chunk(whole, slice->dim, place / (training.world_size / experts), experts)
                            : chunk(whole, slice->dim, tensor_rank, training.tensor_ranks);
  }
  for (const auto& group : groups)
    for (const auto& param : group.params)
      if (param.tensor.is_same(handle) && !param.is_gone) return held_by(group, param, place % group.ranks, part);
  throw std::logic_error("a sharded parameter that is in no group");
}

/// `local_ranges` says the same.
void check_local_ranges(const Rank& rank, const nn::Module& model, const Unsharded& unsharded,
                        const std::vector<PlainGroup>& groups) {
  for (const auto& [name, parameter] : unique_parameters(model)) {
    if (!is_fsdp_parameter(parameter)) continue;
    const auto handle = fsdp::unsharded(parameter);
    const auto* slice = unsharded.find_slice(handle);
    const auto sizes = slice != nullptr ? at::IntArrayRef(slice->sizes) : handle.sizes();
    const auto places = at::arange(c10::multiply_integers(sizes)).view(sizes);
    // Told what differs, the library knows this rank's expert alone; told what it is a part of, all.
    const bool is_alone = unsharded.tree.experts_differ && unsharded.is_expert(handle);
    const auto known = is_alone ? places.narrow(0, unsharded.meshes.expert_ranks.get_local_rank(), 1) : places;
    rank.check_identical(local_elements(parameter, known), own_part(rank, unsharded, groups, handle, places),
                         "local_ranges of " + name);
  }
}

std::shared_ptr<TrainingCode> training_code(const RandomTree& tree, const std::shared_ptr<Model>& model,
                                            OwnCollectives own) {
  if (!tree.plain_code) return nullptr;
  std::set<std::string> unpenalised, unknown;
  // One with gaps between its elements is filled in another order than a dense one, as which it is shown.
  for (const auto& [name, parameter] : unique_parameters(*model))
    if (!parameter.is_non_overlapping_and_dense()) unknown.insert(name);
  for (const auto& part : sliced_parts(*model))
    for (const auto& slice : part->slices())
      for (const auto& [name, parameter] : unique_parameters(*model)) {
        if (!parameter.is_same(slice.tensor)) continue;
        if (slice.is_expert) unpenalised.insert(name);
        // Rows of a flat layout, and experts that the library knows one of, do not have the whole's sizes.
        if (slice.is_expert ? tree.experts_differ : tree.other_layout_probability > 0) unknown.insert(name);
      }
  // Each rank's loss penalises its own expert once, whose gradient is averaged over the ranks that have the same one. The
  // plain model's would be the sum over all ranks. And where a gradient takes the dtype that autograd makes, that of the sum of
  // a wider operand's and a penalty's would have to be known.
  for (const auto& [name, parameter] : unique_parameters(*model))
    if (name.ends_with(kWidenedWeight)) unpenalised.insert(name);
  return make_code(model, *tree.plain_code,
                   {.by_init = [unknown](const std::string& name) { return unknown.count(name) > 0; },
                    .by_penalty = [unpenalised](const std::string& name) { return unpenalised.count(name) > 0; }},
                   std::move(own));
}

}  // namespace

Workload build(const RandomTree& tree) {
  auto model = std::make_shared<Model>(tree.root);
  auto unsharded = std::make_shared<Unsharded>(Unsharded{.tree = tree});
  unsharded->ignored = draw_exceptions(tree, *model->body);
  const auto toggles = draw_toggles(tree, *model->body);
  const auto evaluations = draw_evaluations(tree, toggles.size());
  const auto hooks = draw_hooks(tree, *model->body, unsharded->ignored);
  const auto dtypes = std::make_shared<GradDtypes>(tree, *model->body, unsharded->ignored);
  auto groups = std::make_shared<std::vector<PlainGroup>>();
  auto localize = [model, unsharded](const Rank& rank, FullyShardOptions& options) {
    unsharded->meshes = make_meshes(rank, unsharded->tree);
    options.mesh = unsharded->meshes.given;
    options.dp_mesh_dims = unsharded->meshes.dims;
    cut_parts(*model, *unsharded);
  };
  auto shard = [model, tree, unsharded, dtypes, groups](const FullyShardOptions& options) {
    dtypes->set_before_sharding();
    Sharder sharder(*model, unsharded, options);
    bool everything = !tree.root_is_sharded;
    sharder.visit(*model->out, everything);
    sharder.visit(*model->body, everything);
    if (tree.root_is_sharded) sharder.shard(*model);
    if (tree.explicit_prefetch) sharder.prefetch_by_list();
    *groups = sharder.groups();
    use_checkpoints(*model->body);  // the plain model keeps its activations
  };
  auto log = std::make_shared<CallLog*>(nullptr);  // of the rank, if this is watched
  std::vector<at::Tensor> experts;
  for (const auto& part : sliced_parts(*model))
    for (auto& slice : part->slices())
      if (slice.is_expert) experts.push_back(slice.tensor);
  const OwnCollectives own = [log, groups] { return *log != nullptr ? own_collectives(**log, groups) : nullptr; };
  const auto is_expert = [experts](const at::Tensor& handle) { return is_among(handle, experts); };
  return {.module = model,
          .shard = shard,
          .loss =
              [model, log, width = tree.root.width](Inputs& in) {
                if (*log != nullptr) note_micro_batch(**log, in.micro_batch);
                return model->loss(in, width);
              },
          .watch =
              [model, unsharded, groups, log, hooks](Rank& rank) {
                *log = &rank.log();
                register_hooks(rank, *model->body, hooks);
                check_local_ranges(rank, *model, *unsharded, *groups);
                return watch_run(rank, model, groups, unsharded->tree.training);
              },
          .before_step =
              [model, tree, toggles, evaluations, dtypes, groups, log](int step) {
                const auto registered = unique_parameters(*model->body);
                dtypes->begin_step(step);
                if (*log != nullptr) {
                  dtypes->set_for_step(registered);
                  for (const auto& [name, parameter] : unique_parameters(*model))
                    if (is_fsdp_parameter(parameter))
                      note_gradient_dtypes(**log, *groups, fsdp::unsharded(parameter), dtypes->of(fsdp::unsharded(parameter)));
                }
                const auto evaluate_before = [&](size_t toggle) {
                  const bool is_due = evaluations[static_cast<size_t>(step)] == static_cast<int64_t>(toggle);
                  if (is_due && *log != nullptr) evaluate(*model, tree, step);
                };
                for (const auto& toggle : toggles) {
                  evaluate_before(static_cast<size_t>(&toggle - toggles.data()));
                  const bool is_trainable = toggle.is_trainable[static_cast<size_t>(step)];
                  for (size_t i = 0; i < toggle.names.size(); ++i) {
                    const auto& member = toggle.members[i];
                    if (*log != nullptr) note_trainable(**log, *groups, member, is_trainable);
                    chosen(toggle.by, registered, toggle.names[i], member).set_requires_grad(is_trainable);
                  }
                }
                evaluate_before(toggles.size());
              },
          .after_average =
              [hooks, dtypes] {
                for (const auto& hook : hooks)
                  if (auto gradient = hook.member.grad(); gradient.defined()) gradient.mul_(hook.factor());
                dtypes->round();
              },
          .localize = localize,
          .averaged_over =
              [is_expert, tree](const at::Tensor& parameter) {
                return tree.training.world_size / (is_expert(parameter) ? static_cast<int>(tree.expert_ranks) : 1);
              },
          .own_part =
              [unsharded, groups](const Rank& rank, const at::Tensor& parameter, const at::Tensor& whole) {
                return own_part(rank, *unsharded, *groups, fsdp::unsharded(parameter), whole);
              },
          .gradient_dtypes = [dtypes](const at::Tensor& parameter) { return dtypes->of(parameter); },
          .code = training_code(tree, model, own)};
}

}  // namespace fsdp::test
