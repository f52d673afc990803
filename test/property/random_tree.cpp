#include "property/random_tree.hpp"

#include <set>

#include "property/parallel_parts.hpp"

namespace fsdp::test {
namespace {

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

/// Norms divide by what may be small: in float their rounding grows beyond any fixed tolerance.
bool normalises(const Part& part) {
  static const std::set<std::string> kinds{"norm", "attention", "around", "conv1d", "conv2d"};
  return kinds.count(part.kind) > 0;
}

bool may_be_skipped(const Part& part) { return part.skip_period > 0; }
bool chooses(const Part& part) { return part.kind == "choice"; }
bool borrows(const Part& part) { return part.kind == "borrow"; }

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

/// Compute in float what is kept in double. Sums are added up in either.
void draw_policy(Draw& draw, Training& training) {
  training.param_dtype = at::kFloat;
  if (draw.chance(0.7)) training.reduce_dtype = draw.one_of<at::ScalarType>({at::kFloat, at::kDouble});
}

void for_each_part(Part& part, const std::function<void(Part&)>& visit) {
  visit(part);
  for (auto& inner : part.parts) for_each_part(inner, visit);
}

std::vector<int64_t> divisors_of(int64_t number) {
  std::vector<int64_t> divisors;
  for (int64_t n = 1; n <= number; ++n)
    if (number % n == 0) divisors.push_back(n);
  return divisors;
}

/// One more part of this kind, and some of another kind made into it.
void add_parts(Draw& draw, RandomTree& tree, const std::string& kind, const std::string& instead_of) {
  for_each_part(tree.root, [&](Part& part) {
    if (part.kind == instead_of && draw.chance(0.5)) part.kind = kind;
  });
  auto& parts = tree.root.parts;
  Part part{.kind = kind, .width = tree.root.width, .inner = draw.number(1, 9), .flag = draw.chance(0.5)};
  parts.insert(parts.begin() + draw.number(0, static_cast<int64_t>(parts.size())), std::move(part));
}

/// Compute in 16 bits what is kept in float or double. Sums are added up there, or in one that holds more.
void draw_low_precision(Draw& draw, RandomTree& tree) {
  auto& training = tree.training;
  training.param_dtype = draw.chance(0.75) ? at::kBFloat16 : at::kHalf;
  training.reduce_dtype.reset();
  if (draw.chance(0.7))
    training.reduce_dtype = draw.one_of<at::ScalarType>({at::kFloat, at::kFloat, at::kDouble, *training.param_dtype});
  // A view that was taken before the step's first gather comes later in autograd's order than in the plain model,
  // and more than two gradients of one tensor round in their order.
  for_each_part(tree.root, [](Part& part) {
    if (part.kind == "twice" && contains(part, borrows)) part.kind = "sequence";
  });
}

void draw_tensor_parallelism(Draw& draw, RandomTree& tree) {
  auto& training = tree.training;
  const int64_t most = 8 / training.world_size;
  if (most < 2) return;
  // Two summands are the same in any order, in 16 bits too.
  training.tensor_ranks = training.is_low() ? 2 : static_cast<int>(draw.number(2, std::min<int64_t>(most, 4)));
  tree.names_dims = draw.chance(0.5);
  tree.merges_dims = training.replicas == 0 && !training.replicate_only && draw.chance(0.3);
  add_parts(draw, tree, kColumns, "mlp");
}

void draw_experts(Draw& draw, RandomTree& tree) {
  auto choices = divisors_of(tree.training.world_size);
  choices.erase(choices.begin());
  if (choices.empty()) return;
  tree.expert_ranks = draw.one_of(choices);
  tree.experts_differ = draw.chance(0.5);
  add_parts(draw, tree, kExperts, "stack");
}

/// Parameters that are not spread as their module is.
void draw_placements(Draw& draw, RandomTree& tree) {
  if (draw.chance(0.3)) draw_tensor_parallelism(draw, tree);
  if (draw.chance(0.25)) draw_experts(draw, tree);
  if (draw.chance(0.25)) {
    tree.other_mesh_probability = draw.one_of<double>({0.2, 0.6});
    if (!tree.training.replicate_only && draw.chance(0.6))
      tree.other_replicas = draw.one_of(divisors_of(tree.training.world_size));
  }
  if (draw.chance(0.25)) tree.replicated_probability = draw.one_of<double>({0.15, 0.5});
  for_each_part(tree.root, [&](Part& part) {
    if (part.kind == kColumns && tree.training.is_low()) part.ranks = tree.training.tensor_ranks;
    if (part.kind != kExperts) return;
    part.ranks = tree.expert_ranks;
    part.ranks_of_each = tree.training.world_size / tree.expert_ranks;
  });
}

/// What users do to parameters between steps and in backward. Drawn apart: the rest of a seed's model stays what it is.
void draw_interventions(RandomTree& tree) {
  Draw draw(tree.seed * 104729 + 7);
  if (draw.chance(0.35)) tree.toggled_probability = draw.one_of<double>({0.2, 0.6, 1.0});
  // A step may begin with a view of an unsharded parameter, which alone reads nothing.
  if (draw.chance(tree.toggled_probability > 0 ? 0.7 : 0.15)) {
    Part part{.kind = kViewed, .width = tree.root.width, .inner = draw.number(1, 9)};
    tree.root.parts.insert(tree.root.parts.begin(), std::move(part));
  }
  // In 16 bits a hook's own rounding would come on top.
  if (!tree.training.is_low() && draw.chance(0.25)) tree.hooked_probability = draw.one_of<double>({0.2, 0.7});
  if (!tree.root_is_sharded && tree.toggled_probability > 0 && contains(tree.root, chooses))
    tree.training.accumulation = Accumulation::kReduceEach;
}

/// Forwards without a backward. Drawn apart, too.
void draw_evaluations(RandomTree& tree) {
  Draw draw(tree.seed * 179424673 + 11);
  if (draw.chance(tree.toggled_probability > 0 ? 0.6 : 0.1)) tree.evaluated_probability = draw.one_of<double>({0.4, 1.0});
}

/// What a program does to values, and what shows parameters' memory from before fully_shard. Drawn apart, too.
void draw_writes(RandomTree& tree) {
  Draw draw(tree.seed * 49979687 + 31);
  if (draw.chance(0.35)) tree.written_probability = draw.one_of<double>({0.3, 0.8});
  if (tree.written_probability > 0 && tree.evaluated_probability == 0 && draw.chance(0.5)) tree.evaluated_probability = 0.6;
  if (draw.chance(0.12)) tree.alias_probability = draw.one_of<double>({0.15, 0.5});
  tree.ties_by_set_data = draw.chance(0.02);
}

/// Of one root: a forward that several roots refuse halfway cannot begin anew. Drawn apart, too.
void draw_budgets(RandomTree& tree) {
  Draw draw(tree.seed * 49979693 + 37);
  tree.draws_budgets = draw.chance(0.25) && tree.root_is_sharded && !tree.training.budget_factor;
}

/// In which dtypes gradients come, go and stay. Drawn apart, too.
void draw_gradient_dtypes(RandomTree& tree) {
  Draw draw(tree.seed * 15485863 + 3);
  auto& training = tree.training;
  if (draw.chance(0.25)) {
    auto& parts = tree.root.parts;
    Part part{.kind = kWidened, .width = tree.root.width};
    parts.insert(parts.begin() + draw.number(0, static_cast<int64_t>(parts.size())), std::move(part));
    training.casts_inputs = false;  // or there were no wider operand
  }
  if (draw.chance(0.3)) tree.grad_dtype_probability = draw.one_of<double>({0.2, 0.6, 1.0});
  if (tree.grad_dtype_probability > 0 && !training.is_delicate) training.rounds_gradients = draw.chance(0.6);
}

}  // namespace

bool contains(const Part& part, const std::function<bool(const Part&)>& wanted) {
  return wanted(part) ||
         std::any_of(part.parts.begin(), part.parts.end(), [&](const Part& inner) { return contains(inner, wanted); });
}

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
  if (draw.chance(0.3))
    training.separate_reductions = draw.one_of(std::vector(kReduceScatterStarts.begin(), kReduceScatterStarts.end()));
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
  training.is_delicate = is_delicate;
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
  if (!is_delicate && tree.ignored_probability == 0 && draw.chance(0.45)) draw_low_precision(draw, tree);
  draw_placements(draw, tree);
  draw_interventions(tree);
  draw_evaluations(tree);
  draw_writes(tree);
  draw_budgets(tree);
  draw_gradient_dtypes(tree);
  tree.plain_code = draw_plain_code(tree);
  return tree;
}

namespace {

std::string describe(const Part& part) {
  std::string text = fmt::format("{}({}", part.kind, part.inner);
  if (part.flag) text += "+";
  if (part.kind == kExperts) text += fmt::format(" of {}", part.ranks);
  if (part.skip_period) text += fmt::format(" skipped each {}", part.skip_period);
  for (auto& inner : part.parts) text += " " + describe(inner);
  return text + ")";
}

std::string describe_interventions(const RandomTree& tree) {
  std::string text;
  if (tree.toggled_probability > 0) text += fmt::format("frozen and thawed with {}; ", tree.toggled_probability);
  if (tree.evaluated_probability > 0) text += fmt::format("evaluated with {}; ", tree.evaluated_probability);
  if (tree.written_probability > 0) text += fmt::format("values written with {}; ", tree.written_probability);
  if (tree.alias_probability > 0) text += fmt::format("shown by others with {}; ", tree.alias_probability);
  if (tree.ties_by_set_data) text += "two tied by set_data; ";
  if (tree.draws_budgets) text += "budgets from step to step; ";
  if (tree.hooked_probability > 0) text += fmt::format("gradient hooks with {}; ", tree.hooked_probability);
  if (tree.grad_dtype_probability > 0)
    text += fmt::format("grad_dtype with {}{}; ", tree.grad_dtype_probability,
                        tree.training.rounds_gradients ? ", smaller ones too" : "");
  if (!tree.training.casts_inputs) text += "inputs not cast; ";
  return text.empty() ? text : text + "\n";
}

std::string describe_placements(const RandomTree& tree) {
  std::string text;
  if (tree.training.tensor_ranks > 1)
    text += fmt::format("tensor parallel over {}{}{}; ", tree.training.tensor_ranks,
                        tree.names_dims || tree.merges_dims ? " by dp_mesh_dims" : "", tree.merges_dims ? ", merged" : "");
  if (tree.expert_ranks > 1)
    text += fmt::format("{} experts, said by {}; ", tree.expert_ranks,
                        tree.experts_differ ? "differs_over" : "tensor_parallel_fn");
  if (tree.other_mesh_probability > 0)
    text += fmt::format("on another mesh of {} replicas with {}; ", tree.other_replicas, tree.other_mesh_probability);
  if (tree.replicated_probability > 0) text += fmt::format("replicated with {}; ", tree.replicated_probability);
  return text.empty() ? text : text + "\n";
}

}  // namespace

std::string describe(const RandomTree& tree) {
  auto& t = tree.training;
  const auto name_of = [](std::optional<at::ScalarType> dtype) { return dtype ? c10::toString(*dtype) : "own"; };
  return fmt::format(
      "world {} replicas {}{} width {} {}\nsteps {} micro-batches {} accumulation {} prefetch {}{}{} max norm {}{}{}\n"
      "sharded with probability {}, root {}, frozen with probability {}, ignored with {}, other layouts with {}, "
      "budget {}, offloaded with {}{}\ncomputed in {}, reduced in {}\n{}{}{}{}",
      t.world_size, t.replicas, t.replicate_only ? " replicate-only" : "", tree.root.width, c10::toString(t.dtype), t.steps,
      t.micro_batches, static_cast<int>(t.accumulation), t.prefetch_distance, tree.explicit_prefetch ? " and lists" : "",
      t.separate_reductions ? fmt::format(" reductions apart, {}", fsdp::name_of(*t.separate_reductions)) : "",
      t.max_norm.value_or(0), t.reduce_unused ? " reduce_scatter_unused_params" : "",
      t.launches_batches ? fmt::format(" batched launches of pieces from {} bytes", t.packs_below) : "", tree.shard_probability, tree.root_is_sharded, tree.frozen_probability,
      tree.ignored_probability, tree.other_layout_probability, t.budget_factor.value_or(0), tree.offload_probability, tree.splits_ties ? ", ties split" : "", name_of(t.param_dtype),
      name_of(t.reduce_dtype), describe_placements(tree), describe_interventions(tree),
      tree.plain_code ? describe(*tree.plain_code) : "", describe(tree.root));
}

}  // namespace fsdp::test
