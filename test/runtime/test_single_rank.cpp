#include <catch2/catch.hpp>

#include "support/models.hpp"

// A world of one rank: nothing is communicated, copied or released.

namespace fsdp::test {
namespace {

struct OneRank {
  OneRank() : world(recording(single_rank(), log)), mesh(init_device_mesh(world, {1}, {"shard"})) {}
  std::shared_ptr<CallLog> log = std::make_shared<CallLog>();
  std::shared_ptr<Communicator> world;
  DeviceMesh mesh;
};

TEST_CASE("one rank trains bit for bit as the plain model and communicates nothing", "[runtime][single_rank]") {
  OneRank one;
  auto plain = plain_chain();
  ShardedChain chain(one.mesh);
  torch::optim::AdamW optimizer(chain.model->parameters()), plain_optimizer(plain->parameters());
  for (int step = 0; step < 4; ++step) {
    plain_optimizer.zero_grad();
    optimizer.zero_grad();
    Inputs inputs(0, step);
    auto plain_loss = plain->forward(inputs.normal({4, 6})).square().mean();
    auto loss = chain.loss(0, step);
    CHECK(at::equal(loss, plain_loss));
    plain_loss.backward();
    loss.backward();
    auto full = plain->parameters(), found = chain.model->parameters();
    double plain_norm = torch::nn::utils::clip_grad_norm_(full, 0.05);
    CHECK(clip_grad_norm_(found, 0.05) == Approx(plain_norm).epsilon(1e-6));
    for (size_t i = 0; i < full.size(); ++i) {
      REQUIRE(found[i].grad().defined());
      CHECK(at::allclose(found[i].grad(), full[i].grad(), 1e-6, 1e-9));
      found[i].mutable_grad().copy_(full[i].grad());  // the norm alone may round differently
    }
    plain_optimizer.step();
    optimizer.step();
    for (size_t i = 0; i < full.size(); ++i) CHECK(at::equal(found[i], full[i]));
  }
  CHECK(one.log->calls.empty());
}

TEST_CASE("with one rank gradients are identical without clipping, and nothing is copied or released",
          "[runtime][single_rank]") {
  OneRank one;
  auto plain = plain_chain();
  ShardedChain chain(one.mesh);
  auto& weight = chain.model->layers[0]->weight;
  auto address = weight.const_data_ptr();
  for (int step = 0; step < 2; ++step) {
    chain.model->zero_grad();
    chain.loss(0, step).backward();
    auto expected = averaged_gradients(plain, 1, step);
    auto found = chain.model->parameters();
    for (size_t i = 0; i < found.size(); ++i) CHECK(at::equal(found[i].grad(), expected[i].second));
    CHECK(weight.const_data_ptr() == address);
    CHECK(to_local(sharded(weight)).const_data_ptr() == address);
  }
  CHECK(at::equal(dtensor_of(weight).full_tensor(), plain->layers[0]->weight));
  CHECK(one.log->calls.empty());
}

TEST_CASE("one rank: accumulation, frozen parameters, writes and errors behave as with many", "[runtime][single_rank]") {
  for (auto form : {Accumulation::kReduceEach, Accumulation::kSyncAtLast, Accumulation::kLastBackward})
    trains_like_plain([] { return chain_workload(); }, {.world_size = 1, .micro_batches = 2, .accumulation = form});
  OneRank one;
  ShardedChain chain(one.mesh);
  torch::nn::init::constant_(chain.model->head->bias, 2.0);
  CHECK(at::equal(sharded(chain.model->head->bias), torch::full({2}, 2.0)));
  CHECK_THROWS_AS(fully_shard(chain.model, {.mesh = one.mesh}), Error);
  CHECK_THROWS_AS(sharded(torch::ones({2})), UsageError);
  CHECK_THROWS_AS(sharded(chain.model->head->bias).set_data(torch::ones({3})), UsageError);
  chain.loss(0, 0).backward();
  const auto norm = chain.model->head->bias.grad().norm().item<double>();
  CHECK(clip_grad_norm_({chain.model->head->bias}, norm / 2) == Approx(norm));
  CHECK(chain.model->head->bias.grad().norm().item<double>() == Approx(norm / 2));
  CHECK(one.log->calls.empty());
}

TEST_CASE("a process without a launcher is one rank when the mesh is left out", "[runtime][single_rank]") {
  init_process_group();
  auto model = plain_chain(1);
  auto root = fully_shard(model);
  CHECK(root.mesh().size() == 1);
  model->forward(torch::ones({1, 6})).sum().backward();
  CHECK(model->parameters()[0].grad().defined());
  destroy_process_group();
  CHECK_FALSE(is_initialized());
}

}  // namespace
}  // namespace fsdp::test
