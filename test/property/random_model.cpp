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
              [model, groups, log, training = tree.training](Rank& rank) {
                *log = &rank.log();
                return watch_run(rank, model, groups, training);
              },
          .localize = localize,
          .averaged_over =
              [is_expert, tree](const at::Tensor& parameter) {
                return tree.training.world_size / (is_expert(parameter) ? static_cast<int>(tree.expert_ranks) : 1);
              },
          .known_part =
              [is_expert, unsharded](const at::Tensor& parameter, const at::Tensor& whole) {
                // Told what differs, the library knows this rank's expert alone; told what it is a part of, all.
                const bool is_alone = unsharded->tree.experts_differ && is_expert(handle_of(parameter));
                return is_alone ? whole.narrow(0, unsharded->meshes.expert_ranks.local_rank(), 1) : whole;
              }};
}

}  // namespace fsdp::test
