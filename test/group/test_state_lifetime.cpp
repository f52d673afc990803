#include <catch2/catch.hpp>

#include <memory>
#include <mutex>
#include <vector>

#include "module/handles.hpp"
#include "support/models.hpp"

// What the library keeps of a sharded module goes with it.

namespace fsdp::test {
namespace {

namespace nn = torch::nn;

TEST_CASE("when the module goes its tensors go with it, and its state by the next call of fully_shard",
          "[group][lifetime]") {
  std::mutex mutex;
  std::vector<std::weak_ptr<ModuleState>> states;
  on_ranks(2, [&](Rank& rank) {
    std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> memory;
    {
      ShardedChain chain(rank.mesh());
      chain.step(rank.index());
      std::lock_guard lock(mutex);
      for (auto& module : chain.root[0].sharded_modules()) states.push_back(handles::shared_state(module));
      for (auto& parameter : chain.model->parameters()) {
        memory.emplace_back(parameter.storage().getWeakStorageImpl());
        memory.emplace_back(fsdp::unsharded(parameter).storage().getWeakStorageImpl());
      }
    }
    rank.check_equal(memory.size(), size_t{16}, "tensors");
    for (auto& storage : memory) rank.check(storage.expired(), "the memory of a parameter is gone");
  });
  nn::Linear other(2, 2);
  fully_shard(other, {.mesh = init_device_mesh(single_rank(), {1})});
  REQUIRE(states.size() == 8);
  for (auto& state : states) CHECK(state.expired());
}

TEST_CASE("a model that goes while reductions wait for the last backward leaves nothing behind", "[group][lifetime]") {
  on_ranks(2, [](Rank& rank) {
    std::weak_ptr<ModuleState> state;
    {
      ShardedChain chain(rank.mesh());
      state = handles::shared_state(chain.layers[0]);
      chain.root[0].set_is_last_backward(false);
      chain.loss(rank.index(), 0).backward();
    }
    rank.check(state.expired(), "its state is gone");
  });
}

}  // namespace
}  // namespace fsdp::test
