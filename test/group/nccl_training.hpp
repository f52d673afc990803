#pragma once

#include <string>
#include <vector>

#include "comm/nccl_ranks.hpp"
#include "support/models.hpp"

// Chains that train over functions that stand in for NCCL's, compared with the plain model.

namespace fsdp::test {

inline constexpr int64_t kChainWidth = 256;      // of two ranks' weights each half is 128 KiB: it travels by itself
inline constexpr int64_t kNcclBlock = 2 << 20;  // what NCCL's memory comes in

/// Throws what a test of a rank is to find.
inline void expect(bool condition, const std::string& what) {
  if (!condition) throw UsageError("not so: " + what);
}

inline DeviceMesh mesh_of(const NcclRank& rank) {
  return init_device_mesh(rank.world, {rank.world->size()}, {"shard"});
}

inline void wait_for_all(const NcclRank& rank) { all_reduce(*rank.world, at::ones({1})); }

/// Which of how many parts of every parameter a rank holds.
struct Part {
  int64_t index = 0, count = 1;
};

inline void expect_gradients(const torch::nn::Module& model, const NamedTensors& expected, Part part,
                             const std::string& what) {
  const auto parameters = unique_parameters(model);
  expect(parameters.size() == expected.size(), what + ": the number of parameters");
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto& [name, parameter] = parameters[i];
    const auto& whole = expected[i].second;
    expect(parameter.grad().defined() == whole.defined(), what + ": a gradient where the plain one has: " + name);
    if (!whole.defined()) continue;
    const auto rows = rows_of(whole, part.index, part.count);
    expect(parameter.grad().sizes() == whole.sizes(), fmt::format("{}: the gradient of {} has the whole's sizes", what, name));
    const auto piece = to_local(parameter.grad());
    expect(piece.sizes() == rows.sizes() && at::allclose(piece, rows, 1e-4, 1e-7),
           fmt::format("{}: gradient of {}", what, name));
  }
}

/// One step, whose gradients are those of the plain model. part: none: the rank's among all.
inline void train(ShardedChain& chain, const NcclRank& rank, int step, std::optional<Part> part = {}) {
  const int index = rank.world->rank(), ranks = rank.world->size();
  auto plain = plain_chain(static_cast<int>(chain.layers.size()), kChainWidth);
  plain->skipped = chain.model->skipped;
  const auto expected = averaged_gradients(plain, ranks, step);
  chain.loss(index, step).backward();
  expect_gradients(*chain.model, expected, part.value_or(Part{index, ranks}), fmt::format("step {}", step));
  chain.model->zero_grad();
}

inline void use_symmetric_memory(ShardedChain& chain) {
  for (auto& layer : chain.layers) layer.set_symm_mem_for_comm();
  chain.root[0].set_symm_mem_for_comm();
}

}  // namespace fsdp::test
