#pragma once

#include <torch/torch.h>

#include <functional>
#include <string>
#include <vector>

#include "spread_call.hpp"
#include "support/ranks.hpp"
#include "tensor/whole_tensors.hpp"

namespace fsdp::test {

using Tensors = std::vector<at::Tensor>;

inline at::Tensor whole_of(const at::Tensor& tensor) { return is_dtensor(tensor) ? DTensor(tensor).full_tensor() : tensor; }

inline at::Tensor values(c10::IntArrayRef sizes, uint64_t seed) { return torch::randn(sizes, at::detail::createCPUGenerator(seed)); }

/// Leaves with gradients, ordinary tensors or DTensors of the same values. Some ranks have no rows of some.
class Leaves {
 public:
  Leaves() { make(); }
  Leaves(DeviceMesh mesh, std::vector<Placement> placements) : mesh_(std::move(mesh)), placements_(std::move(placements)) { make(); }

  const Tensors& all() const { return leaves_; }
  bool are_dtensors() const { return !placements_.empty(); }
  /// An ordinary tensor, or a DTensor that is placed as the leaves.
  at::Tensor spread(const at::Tensor& whole) const {
    return placements_.empty() ? whole.clone() : at::Tensor(distribute_tensor(whole, mesh_, placements_));
  }
  void set_gradients(uint64_t step) {
    uint64_t seed = 100 * step + 100;
    for (auto& leaf : leaves_) leaf.mutable_grad() = spread(values(leaf.sizes(), seed++));
  }
  Tensors gradients() const {
    Tensors gradients;
    for (const auto& leaf : leaves_) gradients.push_back(leaf.grad());
    return gradients;
  }
  at::Tensor loss() const {
    auto loss = torch::zeros({});
    uint64_t seed = 50;
    for (const auto& leaf : leaves_) {
      const auto target = values(leaf.sizes(), seed++);
      loss = loss + (leaf - target).pow(2).sum() + leaf.sin().sum();
    }
    return loss;
  }

 private:
  void make() {
    uint64_t seed = 1;
    for (const std::vector<int64_t>& sizes : std::vector<std::vector<int64_t>>{{5, 3}, {7}, {1}, {}, {4, 2, 2, 2}, {4, 4}, {2, 3}})
      leaves_.push_back(spread(values(sizes, seed++)).set_requires_grad(true));
  }

  DeviceMesh mesh_;
  std::vector<Placement> placements_;
  Tensors leaves_;
};

/// What it returns is compared.
using Program = std::function<Tensors(Leaves&)>;

inline void check_alike(const Rank& rank, const Tensors& found, const Tensors& wanted, const std::string& what) {
  rank.check_equal(found.size(), wanted.size(), what + ": results");
  for (size_t i = 0; i < found.size() && i < wanted.size(); ++i) {
    const auto text = difference(found[i].detach(), wanted[i].detach(), true);
    rank.check(!text, fmt::format("{}: result {}: {}", what, i, text.value_or("")));
  }
}

/// Calls `body(rank, mesh, placements)` on worlds of 1, 2 and 3 ranks, and on 2 x 2 ranks in several ways.
template <class Body>
void on_worlds(const Body& body) {
  const auto run = [&](std::vector<int64_t> shape, std::vector<Placement> placements) {
    on_ranks(static_cast<int>(c10::multiply_integers(shape)), [&](Rank& rank) {
      const auto mesh = mesh_of(rank.world(), shape);
      rank.log().clear();
      body(rank, mesh, placements);
    });
  };
  for (const int64_t ranks : {1, 2, 3}) run({ranks}, {Shard{0}});
  run({2, 2}, {Replicate{}, Shard{0}});
  run({2, 2}, {Shard{0}, Shard{0}});
  run({2, 2}, {StridedShard{0, 2}, Shard{0}});
}

/// The program gives on DTensors what it gives on ordinary tensors.
inline void check_program(const std::string& name, const Program& program) {
  on_worlds([&](Rank& rank, const DeviceMesh& mesh, const std::vector<Placement>& placements) {
    Leaves plain, spread(mesh, placements);
    const auto wanted = program(plain);
    check_alike(rank, program(spread), wanted, name);
  });
}

}  // namespace fsdp::test
