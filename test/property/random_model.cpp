#include <list>
#include <set>

#include "property/aliases.hpp"
#include "property/between_steps.hpp"
#include "property/byte_budgets.hpp"
#include "property/grad_dtypes.hpp"
#include "property/parallel_parts.hpp"
#include "property/parts.hpp"
#include "property/run_watch.hpp"
#include "property/runtime_allocations.hpp"
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

LeftAlone left_alone(const RandomTree& tree, Model& model) {
  std::set<std::string> unpenalised, unknown;
  // One with gaps between its elements is filled in another order than a dense one, as which it is shown.
  for (const auto& [name, parameter] : unique_parameters(model))
    if (!parameter.is_non_overlapping_and_dense()) unknown.insert(name);
  for (const auto& part : sliced_parts(model))
    for (const auto& slice : part->slices())
      for (const auto& [name, parameter] : unique_parameters(model)) {
        if (!parameter.is_same(slice.tensor)) continue;
        if (slice.is_expert) unpenalised.insert(name);
        // Rows of a flat layout, and experts that the library knows one of, do not have the whole's sizes.
        if (slice.is_expert ? tree.experts_differ : tree.other_layout_probability > 0) unknown.insert(name);
      }
  // Each rank's loss penalises its own expert once, whose gradient is averaged over the ranks that have the same one. The
  // plain model's would be the sum over all ranks. And where a gradient takes the dtype that autograd makes, that of the sum of
  // a wider operand's and a penalty's would have to be known.
  for (const auto& [name, parameter] : unique_parameters(model))
    if (name.ends_with(kWidenedWeight)) unpenalised.insert(name);
  return {.by_init = [unknown](const std::string& name) { return unknown.count(name) > 0; },
          .by_penalty = [unpenalised](const std::string& name) { return unpenalised.count(name) > 0; }};
}

/// A random model, and what its sharded form has beside.
struct Drawn {
  RandomTree tree;
  std::shared_ptr<Model> model;
  std::shared_ptr<Unsharded> unsharded;
  std::shared_ptr<GradDtypes> dtypes;
  std::vector<Hook> hooks;
  std::vector<at::Tensor> experts;
  Aliases aliases;
  SetDataTie tie;
  std::shared_ptr<std::vector<PlainGroup>> groups = std::make_shared<std::vector<PlainGroup>>();
  // Of the rank that it is sharded on; none: it is plain.
  const Rank* rank = nullptr;
  CallLog* log = nullptr;  // once it is watched
  std::shared_ptr<ByteBudgets> budgets = nullptr;

  OwnCollectives own_collectives() {
    return [this] { return log != nullptr ? fsdp::test::own_collectives(*log, groups) : nullptr; };
  }
};

Drawn draw_model(const RandomTree& tree) {
  auto model = std::make_shared<Model>(tree.root);
  auto unsharded = std::make_shared<Unsharded>(Unsharded{.tree = tree});
  unsharded->ignored = draw_exceptions(tree, *model->body);
  std::vector<at::Tensor> experts, cut;
  for (const auto& part : sliced_parts(*model))
    for (auto& slice : part->slices()) {
      if (slice.is_expert) experts.push_back(slice.tensor);
      cut.push_back(slice.tensor);
    }
  auto apart = cut;
  apart.insert(apart.end(), unsharded->ignored.begin(), unsharded->ignored.end());
  return {.tree = tree,
          .model = model,
          .unsharded = unsharded,
          .dtypes = std::make_shared<GradDtypes>(tree, *model->body, unsharded->ignored),
          .hooks = draw_hooks(tree, *model->body, unsharded->ignored),
          .experts = std::move(experts),
          .aliases = Aliases(tree, *model, apart),
          .tie = SetDataTie::draw(tree, *model, apart)};
}

/// Two parameters are tied before anything else.
class TiedFirst final : public TrainingCode {
 public:
  TiedFirst(SetDataTie tie, std::shared_ptr<TrainingCode> code) : tie_(std::move(tie)), code_(std::move(code)) {}
  void before_sharding() override {
    tie_.make();
    code_->before_sharding();
  }
  void start() override { code_->start(); }
  void zero_grad() override { code_->zero_grad(); }
  at::Tensor penalty() override { return code_->penalty(); }
  std::optional<double> clip() override { return code_->clip(); }
  void step() override { code_->step(); }
  std::vector<Kept> kept() const override { return code_->kept(); }

 private:
  SetDataTie tie_;
  std::shared_ptr<TrainingCode> code_;
};

std::shared_ptr<TrainingCode> training_code(Drawn& drawn) {
  const auto& training = drawn.tree.training;
  auto code = drawn.tree.plain_code ? make_code(drawn.model, *drawn.tree.plain_code, left_alone(drawn.tree, *drawn.model),
                                                drawn.own_collectives())
                                    : adamw_code(drawn.model, training.weight_decay, training.max_norm);
  return drawn.tie.is_there() ? std::make_shared<TiedFirst>(drawn.tie, std::move(code)) : code;
}

void localize(Drawn& drawn, const Rank& rank, FullyShardOptions& options) {
  drawn.rank = &rank;
  auto& meshes = drawn.unsharded->meshes;
  meshes = make_meshes(rank, drawn.tree);
  options.mesh = meshes.given;
  options.dp_mesh_dims = meshes.dims;
  cut_parts(*drawn.model, *drawn.unsharded);
}

void shard_all(Drawn& drawn, const FullyShardOptions& options) {
  auto& model = *drawn.model;
  Sharder sharder(model, drawn.unsharded, options);
  const bool everything = !drawn.tree.root_is_sharded;
  sharder.visit(*model.out, everything);
  sharder.visit(*model.body, everything);
  if (drawn.tree.root_is_sharded) sharder.shard(model);
  if (drawn.tree.explicit_prefetch) sharder.prefetch_by_list();
  *drawn.groups = sharder.groups();
}

void shard(Drawn& drawn, const FullyShardOptions& options) {
  drawn.dtypes->set_before_sharding();
  drawn.aliases.make();
  try {
    shard_all(drawn, options);
  } catch (const UsageError& error) {
    if (!drawn.tie.is_there()) throw;
    drawn.tie.check_refused(*drawn.rank, message_of(error));
    throw RefusedAsExpected();
  }
  use_checkpoints(*drawn.model->body);  // the plain model keeps its activations
}

at::Tensor loss(Drawn& drawn, Inputs& inputs) {
  if (drawn.log == nullptr) return drawn.model->loss(inputs, drawn.tree.root.width);
  drawn.budgets->check(fmt::format("before step {}, micro-batch {}", inputs.step, inputs.micro_batch));
  note_micro_batch(*drawn.log, inputs.micro_batch);
  return drawn.budgets->forward([&] {
    inputs.rewind();
    return drawn.model->loss(inputs, drawn.tree.root.width);
  });
}

/// In eval mode, which leaves statistics as they are; all ranks on one batch. The plain model takes it in its own dtype.
at::Tensor evaluate(Drawn& drawn, int step) {
  const auto& training = drawn.tree.training;
  Inputs inputs(/*rank=*/0, step, /*micro_batch=*/0, training.dtype,
                drawn.log != nullptr ? training.param_dtype : std::nullopt);
  // Without autograd and without a scope a list hands out what is registered, as between steps.
  const auto is_list = [](const Part& part) { return part.kind == "lists"; };
  const bool has_scope = drawn.log != nullptr && !at::GradMode::is_enabled() &&
                         (drawn.tree.seed % 2 == 0 || contains(drawn.tree.root, is_list));
  const auto run = [&] {
    std::list<ForwardScope> scopes;
    if (has_scope)
      for (const auto& root : roots(*drawn.model)) scopes.emplace_back(root);
    inputs.rewind();
    return drawn.model->loss(inputs, drawn.tree.root.width);
  };
  drawn.model->eval();
  auto loss = drawn.log != nullptr ? drawn.budgets->forward(run) : run();
  drawn.model->train();
  if (drawn.log != nullptr) drawn.budgets->check(fmt::format("evaluation before step {}", step));
  return loss;
}

void check_outlook(Drawn& drawn, const Rank& rank) {
  const auto& training = drawn.tree.training;
  const auto reads = [](const Hook& hook) { return hook.reads; };
  if (std::ranges::any_of(drawn.hooks, reads)) return;  // beside the plan
  const int place = rank.index() / training.tensor_ranks;
  const auto inputs = std::make_shared<Inputs>(place, training.steps - 1, training.micro_batches - 1, training.dtype,
                                               training.param_dtype);
  drawn.budgets->check_outlook({.forward =
                                    [&drawn, inputs] {
                                      inputs->rewind();
                                      return drawn.model->loss(*inputs, drawn.tree.root.width);
                                    },
                                .end = [&drawn] { drawn.model->zero_grad(); }});
}

std::function<void()> watch(Drawn& drawn, Rank& rank) {
  drawn.log = &rank.log();
  register_hooks(rank, *drawn.model->body, drawn.hooks);
  check_local_ranges(rank, *drawn.model, *drawn.unsharded, *drawn.groups);
  std::vector<at::Tensor> hooked;
  for (const auto& hook : drawn.hooks)
    if (hook.reads) hooked.push_back(hook.member);
  drawn.budgets = std::make_shared<ByteBudgets>(rank, *drawn.model, drawn.groups, drawn.tree, hooked);
  drawn.aliases.read(rank, unique_parameters(*drawn.model), "before the first step");
  const auto on_range = [budgets = drawn.budgets.get()](std::string_view name) { budgets->note_range(name); };
  return [&drawn, &rank, on_range, check_run = watch_run(rank, drawn.model, drawn.groups, drawn.tree.training, on_range)] {
    check_run();
    listen_to_ranges(on_range);
    drawn.aliases.read(rank, unique_parameters(*drawn.model), "after the last step");
    check_outlook(drawn, rank);
    listen_to_ranges({});
  };
}

}  // namespace

Workload build(const RandomTree& tree) {
  const auto drawn = std::make_shared<Drawn>(draw_model(tree));
  const auto steps = std::make_shared<BetweenSteps>(tree, drawn->model, drawn->model->body, drawn->dtypes,
                                                    [drawn](int step) { return evaluate(*drawn, step); });
  return {.module = drawn->model,
          .shard = [drawn](const FullyShardOptions& options) { return shard(*drawn, options); },
          .loss = [drawn](Inputs& inputs) { return loss(*drawn, inputs); },
          .watch = [drawn](Rank& rank) { return watch(*drawn, rank); },
          .before_step =
              [drawn, steps](int step) {
                if (drawn->log == nullptr) return steps->run(step, nullptr);
                drawn->budgets->check(fmt::format("before step {}", step));
                drawn->budgets->draw_next();
                const BetweenSteps::Sharded sharded{*drawn->log, *drawn->groups, drawn->own_collectives()};
                return steps->run(step, &sharded);
              },
          .after_average =
              [drawn] {
                for (const auto& hook : drawn->hooks)
                  if (auto gradient = hook.member.grad(); gradient.defined()) gradient.mul_(hook.factor());
                drawn->dtypes->round();
              },
          .localize = [drawn](const Rank& rank, FullyShardOptions& options) { localize(*drawn, rank, options); },
          .averaged_over =
              [drawn](const at::Tensor& parameter) {
                const auto& tree = drawn->tree;
                return tree.training.world_size / (is_among(parameter, drawn->experts) ? static_cast<int>(tree.expert_ranks) : 1);
              },
          .own_part =
              [drawn](const Rank& rank, const at::Tensor& parameter, const at::Tensor& whole) {
                return own_part(rank, *drawn->unsharded, *drawn->groups, fsdp::unsharded(parameter), whole);
              },
          .gradient_dtypes = [drawn](const at::Tensor& parameter) { return drawn->dtypes->of(parameter); },
          .code = training_code(*drawn)};
}

}  // namespace fsdp::test
