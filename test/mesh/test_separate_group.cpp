#include <catch2/catch.hpp>

#include "comm/forwarding.hpp"
#include "support/models.hpp"

// The communicator of its own that reductions may have: how often one is made.

namespace fsdp::test {
namespace {

/// Counts the communicators that are split off.
struct CountsSplits final : ForwardingCommunicator {
  CountsSplits(std::shared_ptr<Communicator> counted, int& count)
      : ForwardingCommunicator(std::move(counted)), splits(count) {}
  std::shared_ptr<Communicator> split(std::span<const int> ranks, const std::string& name) override {
    ++splits;
    return inner().split(ranks, name);
  }
  int& splits;
};

}  // namespace

TEST_CASE("the ranks of a mesh have one communicator for reductions, whatever asks for it", "[group][separate_group]") {
  CHECK(on_ranks(2, [](Rank& rank) {
    int splits = 0;
    const auto world = std::make_shared<CountsSplits>(rank.mesh().get_group(0), splits);
    const auto mesh = init_device_mesh(world, {2}, {"shard"});
    {
      ShardedChain chain(mesh), other(mesh);
      for (auto& layer : chain.layers) layer.set_separate_reduce_scatter_group(true, Recurse::kNo);
      rank.check_equal(splits, 1, "module after module");
      chain.root[0].set_separate_reduce_scatter_group();
      other.root[0].set_separate_reduce_scatter_group();
      rank.check_equal(splits, 1, "of two roots");
      for (auto* root : {&chain, &other}) root->step(rank.index());
    }
    ShardedChain later(mesh);
    later.root[0].set_separate_reduce_scatter_group();
    rank.check_equal(splits, 1, "of a root that comes when the others have gone");
    later.step(rank.index());
  }));
}

}  // namespace fsdp::test
