#pragma once

#include <string>
#include <vector>

#include "support/models.hpp"

// Experts that differ from one "ep" rank to the next and are sharded over "edp", between dense layers that are
// sharded over all ranks.

namespace fsdp::test {

/// A dense layer and an expert. Plain: all experts, of which a rank's batch passes its own.
struct EpBlockImpl : torch::nn::Cloneable<EpBlockImpl> {
  EpBlockImpl(int64_t width, std::vector<int64_t> hidden, bool is_plain) : width(width), hidden(std::move(hidden)), is_plain(is_plain) { reset(); }
  void reset() override {
    dense = register_module("dense", torch::nn::Linear(width, width));
    experts.clear();
    for (size_t i = 0; i < hidden.size(); ++i) {
      const auto name = is_plain ? fmt::format("expert{}", i) : std::string("expert");
      experts.push_back(register_module(name, torch::nn::Sequential(torch::nn::Linear(width, hidden[i]), torch::nn::Tanh(),
                                                            torch::nn::Linear(hidden[i], width))));
    }
  }
  at::Tensor forward(const at::Tensor& x, size_t expert) {
    const auto y = torch::tanh(dense->forward(x));
    return y + experts[std::min(expert, experts.size() - 1)]->forward(y);
  }
  int64_t width;
  std::vector<int64_t> hidden;
  bool is_plain;
  torch::nn::Linear dense{nullptr};
  std::vector<torch::nn::Sequential> experts;
};
TORCH_MODULE(EpBlock);

struct EpNetImpl : torch::nn::Cloneable<EpNetImpl> {
  EpNetImpl(int64_t width, std::vector<int64_t> hidden, bool is_plain = false) : width(width), hidden(std::move(hidden)), is_plain(is_plain) { reset(); }
  void reset() override {
    blocks = register_module("blocks", torch::nn::ModuleList());
    for (int i = 0; i < 2; ++i) blocks->push_back(EpBlock(width, hidden, is_plain));
    head = register_module("head", torch::nn::Linear(width, 2));
    steps = register_buffer("steps", torch::rand({2}));
  }
  at::Tensor forward(at::Tensor x, size_t expert) {
    for (const auto& block : *blocks) x = block->as<EpBlockImpl>()->forward(x, expert);
    return head->forward(x);
  }
  at::Tensor loss(int rank, int step, size_t expert) {
    Inputs in(rank, step);
    return forward(in.normal({4, width}), expert).square().mean();
  }
  int64_t width;
  std::vector<int64_t> hidden;
  bool is_plain;
  torch::nn::ModuleList blocks{nullptr};
  torch::nn::Linear head{nullptr};
  at::Tensor steps;
};
TORCH_MODULE(EpNet);

/// The name that the plain model has for a parameter of the net of expert `expert`.
inline std::string plain_name(std::string name, int64_t expert) {
  if (const auto at = name.find("expert."); at != std::string::npos) name.replace(at, 6, fmt::format("expert{}", expert));
  return name;
}

struct EpCase {
  int64_t ep = 2, edp = 2;
  int64_t replicas = 0;  ///< of the dense mesh; 0: one dimension
  ReshardAfterForward reshard = {};
  std::optional<int64_t> dim = {};  ///< along which experts are cut
  std::optional<double> max_norm = {};
  bool is_even = true;  ///< experts are of one size
  int prefetch_distance = 1;

  int ranks() const { return static_cast<int>(ep * edp); }
  int64_t hidden_of(int64_t expert) const { return is_even ? 6 : 5 + 2 * expert; }
  std::vector<int64_t> hidden() const {
    std::vector<int64_t> all;
    for (int64_t e = 0; e < ep; ++e) all.push_back(hidden_of(e));
    return all;
  }
  std::string text() const {
    return fmt::format("ep {} x edp {}, {} replicas, dim {}, even {}", ep, edp, replicas, dim.value_or(-9), is_even);
  }
};

/// One rank's model with its mesh.
struct EpModel {
  EpModel(const Rank& rank, const EpCase& c, uint64_t seed = 11)
      : mesh(init_device_mesh(rank.world(), {c.ep, c.edp}, {"ep", "edp"})),
        dense(c.replicas > 0 ? rank.hybrid(c.replicas, c.ranks() / c.replicas) : rank.mesh()),
        expert(mesh.get_coordinate()[0]),
        plain(seeded(seed, [&] { return EpNet(5, c.hidden(), /*is_plain=*/true); })),
        model(seeded(1, [&] { return EpNet(5, std::vector{c.hidden_of(expert)}); })) {
    at::NoGradGuard no_grad;
    const auto from = plain->named_parameters();
    for (auto& param : model->named_parameters()) param.value().copy_(from[plain_name(param.key(), expert)]);
    model->steps.copy_(plain->steps);
  }

  FullyShardOptions options(const EpCase& c) const {
    return {.mesh = dense,
            .reshard_after_forward = c.reshard,
            .shard_placement_fn = [edp = mesh["edp"], ep = mesh["ep"], dim = c.dim](
                                      const std::string& name, const at::Tensor& parameter) -> std::optional<ShardPlacementResult> {
              if (name.find("expert") == std::string::npos) return std::nullopt;
              return ShardPlacementResult{Shard{parameter.dim() > 1 ? dim.value_or(0) : 0}, edp, ep};
            }};
  }
  FSDPModule shard(const FullyShardOptions& options) const {
    for (auto& block : *model->blocks) fully_shard(*block, options);
    return fully_shard(model, options);
  }

  DeviceMesh mesh, dense;
  int64_t expert;
  EpNet plain, model;
};

/// The plain model's gradients as they have to be: dense ones averaged over all ranks, an expert's over the
/// ranks that have it. Returns each rank's loss.
inline std::vector<at::Tensor> plain_backward(EpNet& plain, const EpCase& c, int step) {
  std::vector<at::Tensor> losses;
  plain->zero_grad();
  for (int rank = 0; rank < c.ranks(); ++rank) {
    losses.push_back(plain->loss(rank, step, static_cast<size_t>(rank / c.edp)));
    losses.back().backward();
  }
  for (auto& param : plain->named_parameters())
    param.value().mutable_grad().div_(param.key().find("expert") != std::string::npos ? static_cast<double>(c.edp)
                                                                                    : static_cast<double>(c.ranks()));
  return losses;
}

}  // namespace fsdp::test
