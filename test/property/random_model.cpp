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

/// Freezes some parameters, and returns those to be ignored.
std::vector<at::Tensor> draw_exceptions(const RandomTree& tree, const nn::Module& body) {
  Draw draw(tree.seed + 5);
  std::vector<at::Tensor> ignored, cut;
  for (const auto& part : sliced_parts(body))
    for (auto& slice : part->slices()) cut.push_back(std::move(slice.tensor));
  for (auto& [name, parameter] : unique_parameters(body)) {
    // What a list or dict hands out is the registered parameter: frozen, and with a batch that needs
    // no gradient, no operator records autograd on it, so it is the shard (T20).
    bool in_container = name.find("list.") != std::string::npos || name.find("dict.") != std::string::npos;
    // Where ranks choose differently, a frozen choice would cut the graph on some ranks only, and with
    // it what the parts in front of it gather in backward.
    bool is_choice = tree.training.reduce_unused && (name.ends_with(".odd") || name.ends_with(".even"));
    // What is ignored is compared as the plain model has it, which is whole.
    bool is_cut = std::any_of(cut.begin(), cut.end(), [&](const auto& one) { return one.is_same(parameter); });
    if (!in_container && !is_choice && draw.chance(tree.frozen_probability)) parameter.set_requires_grad(false);
    if (!in_container && !is_choice && draw.chance(tree.ignored_probability) && !is_cut) ignored.push_back(parameter);
  }
  return ignored;
}

/// Makes the model this rank's part of the plain one.
void cut_parts(const nn::Module& model, Unsharded& unsharded) {
  const auto& meshes = unsharded.meshes;
  for (const auto& part : sliced_parts(model)) {
    auto slices = part->slices();
    for (auto& slice : slices) slice.sizes = slice.tensor.sizes().vec();
    const auto& over = slices.front().is_expert ? meshes.expert_ranks : meshes.tensor;
    part->cut(over.local_rank(), over.size(), over.group().get());
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
    const auto handle = handle_of(parameter);
    const auto* slice = unsharded.find_slice(handle);
    const auto sizes = slice != nullptr ? at::IntArrayRef(slice->sizes) : handle.sizes();
    const auto places = at::arange(c10::multiply_integers(sizes)).view(sizes);
    // Told what differs, the library knows this rank's expert alone; told what it is a part of, all.
    const bool is_alone = unsharded.tree.experts_differ && unsharded.is_expert(handle);
    const auto known = is_alone ? places.narrow(0, unsharded.meshes.expert_ranks.local_rank(), 1) : places;
    rank.check_identical(local_elements(parameter, known), own_part(rank, unsharded, groups, handle, places),
                         "local_ranges of " + name);
  }
}

}  // namespace

Workload build(const RandomTree& tree) {
  auto model = std::make_shared<Model>(tree.root);
  auto unsharded = std::make_shared<Unsharded>(Unsharded{.tree = tree});
  unsharded->ignored = draw_exceptions(tree, *model->body);
  auto groups = std::make_shared<std::vector<PlainGroup>>();
  auto localize = [model, unsharded](const Rank& rank, FullyShardOptions& options) {
    unsharded->meshes = make_meshes(rank, unsharded->tree);
    options.mesh = unsharded->meshes.given;
    options.dp_mesh_dims = unsharded->meshes.dims;
    cut_parts(*model, *unsharded);
  };
  auto shard = [model, tree, unsharded, groups](const FullyShardOptions& options) {
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
  const auto is_expert = [experts](const at::Tensor& handle) {
    return std::any_of(experts.begin(), experts.end(), [&](const auto& expert) { return expert.is_same(handle); });
  };
  return {.module = model,
          .shard = shard,
          .loss =
              [model, log, width = tree.root.width](Inputs& in) {
                if (*log != nullptr) note_micro_batch(**log, in.micro_batch);
                return model->loss(in, width);
              },
          .watch =
              [model, unsharded, groups, log](Rank& rank) {
                *log = &rank.log();
                check_local_ranges(rank, *model, *unsharded, *groups);
                return watch_run(rank, model, groups, unsharded->tree.training);
              },
          .localize = localize,
          .averaged_over =
              [is_expert, tree](const at::Tensor& parameter) {
                return tree.training.world_size / (is_expert(parameter) ? static_cast<int>(tree.expert_ranks) : 1);
              },
          .own_part =
              [unsharded, groups](const Rank& rank, const at::Tensor& parameter, const at::Tensor& whole) {
                return own_part(rank, *unsharded, *groups, handle_of(parameter), whole);
              }};
}

}  // namespace fsdp::test
