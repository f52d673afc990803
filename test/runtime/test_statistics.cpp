#include <catch2/catch.hpp>

#include "support/counting_allocator.hpp"
#include "support/models.hpp"

// What the runtime says that it did against what was seen: by the recording communicator, and by an
// allocator that counts every byte.
namespace fsdp::test {
namespace {

constexpr int64_t kWidth = 48;

/// A root keeps a tensor of the factor that averages, in float, from its first reduction on.
constexpr int64_t kBytesOfFactor = 4;

struct Case {
  std::string name;
  SimulatedNetwork network;
  ReshardAfterForward reshard;
};

/// A step's forward and backward; what it allocated in bytes.
template <class Model>
int64_t bytes_of_step(Model& model, const at::Tensor& input) {
  for (auto& parameter : model->parameters()) parameter.mutable_grad().reset();
  start_recording();
  model->forward(input).sum().backward();
  return allocated_bytes();
}

}  // namespace

TEST_CASE("the bytes that the runtime allocates are those of its plan, exactly", "[statistics][memory]") {
  install_counting_allocator();
  const Case cases[] = {
      {"everything packed", {.world_size = 4, .launches_batches = false}, {}},
      {"everything direct", {.world_size = 4}, {}},
      {"short pieces packed", {.world_size = 4, .packs_below = 1000}, {}},
      {"rows that the ranks do not divide", {.world_size = 3}, {}},
      {"kept after forward", {.world_size = 4}, false},
      {"gathered over two ranks in backward", {.world_size = 4}, 2},
      {"a world of many ranks", {.world_size = 64, .packs_below = 100}, {}},
  };
  for (const auto& [name, network, reshard] : cases) {
    CAPTURE(name);
    const auto input = torch::ones({3, kWidth});
    auto plain = seeded(5, [] { return Chain(3, kWidth); });
    bytes_of_step(plain, input);
    const int64_t plain_bytes = bytes_of_step(plain, input);

    const auto world = simulated_network(network);
    ShardedChain sharded(init_device_mesh(world, {world->size()}, {"shard"}), 3, kWidth, reshard);
    for (int step = 0; step < 3; ++step) {
      const auto before = statistics(sharded.root[0]);
      const int64_t bytes = bytes_of_step(sharded.model, input);
      const auto after = statistics(sharded.root[0]);
      CAPTURE(step);
      const int64_t factors = step == 0 ? 1 : 0;
      CHECK(bytes - plain_bytes == after.buffer_bytes - before.buffer_bytes + factors * kBytesOfFactor);
    }
  }
}

TEST_CASE("gathers, reductions and their bytes are counted as they are launched", "[statistics]") {
  CHECK(on_ranks(2, [](Rank& rank) {
    ShardedChain chain(rank.mesh());
    rank.log().clear();
    for (int step = 0; step < 3; ++step) chain.model->forward(torch::ones({2, 6})).sum().backward();
    int64_t gathers = 0, gathered = 0, reductions = 0, reduced = 0;
    for (const auto& call : rank.log().calls) {
      if (call.operation == "all_gather") ++gathers, gathered += call.bytes;
      if (call.operation == "reduce_scatter") ++reductions, reduced += call.bytes;
    }
    const auto counted = statistics(chain.layers[1]);  // of its root
    rank.check_equal(counted.all_gathers, gathers, "all-gathers");
    rank.check_equal(counted.gathered_bytes, gathered, "gathered bytes");
    rank.check_equal(counted.reductions, reductions, "reductions");
    rank.check_equal(counted.reduced_bytes, reduced, "reduced bytes");
    rank.check_equal(counted.communicated_bytes, (gathered + reduced) / 2, "bytes to and from one other rank");
    rank.check(gathers > 0 && reductions > 0, "the step communicated");
  }));
}

TEST_CASE("what replicas send each other counts as communicated", "[statistics]") {
  CHECK(on_ranks(6, [](Rank& rank) {
    ShardedChain chain(rank.hybrid(3, 2));
    chain.step(rank.index());
    const auto counted = statistics(chain.root[0]);
    // Reduced over 2 ranks, and each half over 3.
    rank.check_equal(counted.communicated_bytes,
                     counted.gathered_bytes / 2 + counted.reduced_bytes / 2 + counted.reduced_bytes / 2 * 4 / 3,
                     "communicated bytes");
  }));
}

TEST_CASE("a gather that nobody waits for allocates no place to unpack it to", "[statistics][memory]") {
  install_counting_allocator();
  const auto world = simulated_network({.world_size = 4, .launches_batches = false});
  ShardedChain chain(init_device_mesh(world, {4}, {"shard"}), 3, kWidth);
  const auto before = statistics(chain.root[0]).buffer_bytes;
  start_recording();
  auto gather = chain.layers[1].unshard_async();
  chain.layers[1].reshard();
  CHECK(allocated_bytes() == statistics(chain.root[0]).buffer_bytes - before);
  CHECK(allocated_bytes() > 0);
}

TEST_CASE("the zeros that stand for unused gradients are in the plan of a rank alone", "[statistics][memory]") {
  install_counting_allocator();
  torch::nn::Module module;
  const auto used = module.register_parameter("used", torch::ones({8}));
  module.register_parameter("unused", torch::ones({100}));
  const auto world = simulated_network({.world_size = 1});
  auto root = fully_shard(module, {.mesh = init_device_mesh(world, {1}, {"shard"})});
  struct Bytes {
    int64_t allocated, planned;
  };
  const auto bytes_of = [&](bool reduces_unused) {
    root.set_reduce_scatter_unused_params(reduces_unused);
    for (auto& parameter : module.parameters()) parameter.mutable_grad().reset();
    const int64_t before = statistics(root).buffer_bytes;
    start_recording();
    used.sum().backward();
    return Bytes{allocated_bytes(), statistics(root).buffer_bytes - before};
  };
  bytes_of(false);
  const auto without = bytes_of(false), with = bytes_of(true);
  CHECK(with.planned - without.planned == 400);
  CHECK(with.allocated - without.allocated == 400);
}

}  // namespace fsdp::test
