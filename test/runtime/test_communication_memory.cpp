#include <catch2/catch.hpp>

#include "support/counting_allocator.hpp"
#include "support/models.hpp"

// In which memory a group's collectives and unsharded parameters lie.

namespace fsdp::test {
namespace {

TEST_CASE("kept unsharded storage has one address, and trains like plain", "[runtime][communication_memory]") {
  const auto make = chain_with([](FSDPModule& root) { root.set_keep_unsharded_storage(true); });
  for (int world_size : {1, 2, 3}) {
    trains_like_plain(make, {.world_size = world_size});
    trains_like_plain(make, {.world_size = world_size, .launches_batches = true});
  }
  trains_like_plain(make, {.world_size = 4, .reshard_after_forward = 2});
  trains_like_plain(make, {.world_size = 4, .replicas = 2});
  for (bool batches : {false, true})
    CHECK(on_ranks(
        2,
        [](Rank& rank) {
          ShardedChain chain(rank.mesh());
          chain.root[0].set_keep_unsharded_storage(true);
          auto address = [&](size_t layer) {
            at::NoGradGuard no_grad;
            return chain.model->layers[layer]->weight.clone(), chain.model->layers[layer]->weight.const_data_ptr();
          };
          std::vector<const void*> first;
          for (size_t layer : {0, 1, 2}) first.push_back(address(layer));
          for (int step = 0; step < 3; ++step) {
            chain.step(rank.index(), step);
            std::vector<at::Tensor> fillers;
            for (int i = 0; i < 20; ++i) fillers.push_back(torch::ones({6 * 6}));
            for (size_t layer : {0, 1, 2})
              rank.check(address(layer) == first[layer], fmt::format("layer {} in step {}", layer, step));
          }
          for (auto& layer : chain.layers) layer.reshard();
          chain.root[0].reshard();
          const auto kept = parameter_bytes(chain.root[0]);
          rank.check_equal(kept.unsharded, int64_t{0}, "nothing is gathered");
          rank.check(kept.kept >= (3 * 42 + 14) * 4, fmt::format("but kept: {}", kept.kept));
          rank.check_throws<std::exception>([&] { chain.model->layers[0]->weight.const_data_ptr(); },
                                            {"layer0.weight"}, "released, as ever");
          chain.root[0].set_keep_unsharded_storage(false);
          rank.check_equal(parameter_bytes(chain.root[0]).kept, int64_t{0}, "given back");
        },
        {.timeout = patience(), .launches_batches = batches}));
}

TEST_CASE("with kept storage a step allocates what its plan says", "[statistics][memory]") {
  install_counting_allocator();
  for (bool batches : {false, true}) {
    const auto world = simulated_network({.world_size = 4, .launches_batches = batches});
    ShardedChain chain(init_device_mesh(world, {4}, {"shard"}), 3, 48);
    chain.root[0].set_keep_unsharded_storage(true);
    chain.step(0);
    const auto before = statistics(chain.layers[0]);
    start_recording();
    chain.layers[0].unshard();
    const int64_t allocated = allocated_bytes();
    const auto after = statistics(chain.layers[0]);
    CHECK(after.all_gathers == before.all_gathers + 1);
    CHECK(allocated == after.buffer_bytes - before.buffer_bytes);
    CHECK(allocated == (batches ? 0 : after.gathered_bytes - before.gathered_bytes));
  }
}

TEST_CASE("what an integer reshard_after_forward keeps goes with the gather that it is for", "[statistics][memory]") {
  install_counting_allocator();
  const auto live_at_the_end_of_backward = [](ReshardAfterForward reshard) {
    const auto world = simulated_network({.world_size = 4});
    ShardedChain chain(init_device_mesh(world, {4}, {"shard"}), 6, 48, reshard);
    int64_t live = 0;
    chain.model->layers[0]->weight.register_hook([&](const at::Tensor&) { live = live_bytes(); });
    for (int step = 0; step < 3; ++step) {
      chain.model->forward(torch::ones({4, 48}).requires_grad_()).sum().backward();
      chain.model->zero_grad();
    }
    return live;
  };
  CHECK(live_at_the_end_of_backward(2) == live_at_the_end_of_backward(true));
}

TEST_CASE("buffers from the process group change nothing where it has none", "[runtime][communication_memory]") {
  const auto control = [](FSDPModule& root) {
    root.set_allocate_memory_from_process_group_for_comm(true, Recurse::kYes);
  };
  for (int world_size : {1, 2, 3}) trains_like_plain(chain_with(control), {.world_size = world_size});
  trains_like_plain(chain_with(control), {.world_size = 4, .replicas = 2, .reshard_after_forward = 2});
  on_ranks(2, [](Rank& rank) {
    ShardedChain chain(rank.mesh());
    auto& root = chain.root[0];
    const char* control = "set_allocate_memory_from_process_group_for_comm";
    root.set_custom_all_gather(std::make_shared<AllGatherComm>());
    rank.check_throws<UsageError>([&] { root.set_allocate_memory_from_process_group_for_comm(true); },
                                  {control, "root", "all-gather"}, "custom all-gather");
    root.set_custom_all_gather(nullptr);
    root.set_custom_reduce_scatter(std::make_shared<ReduceScatterComm>());
    rank.check_throws<UsageError>([&] { root.set_allocate_memory_from_process_group_for_comm(true); },
                                  {control, "root", "reduce-scatter"}, "custom reduce-scatter");
    root.set_custom_reduce_scatter(nullptr);
    root.set_allocate_memory_from_process_group_for_comm(true);
    root.set_allocate_memory_from_process_group_for_comm(false);
    chain.step(rank.index());
  });
}

TEST_CASE("symmetric memory is refused, naming the backend", "[runtime][communication_memory]") {
  on_ranks(2, [](Rank& rank) {
    ShardedChain chain(rank.mesh());
    rank.check_throws<StateError>([&] { chain.root[0].set_symm_mem_for_comm(); },
                                  {"root", "threads", "set_allocate_memory_from_process_group_for_comm"}, "no such memory");
    rank.check_throws<StateError>([&] { chain.root[0].set_symm_mem_for_comm("NVSHMEM"); }, {"NVSHMEM"}, "backend");
    chain.step(rank.index());
  });
}

}  // namespace
}  // namespace fsdp::test
