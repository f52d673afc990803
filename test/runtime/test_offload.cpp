#include <catch2/catch.hpp>

#include "support/models.hpp"
#include "support/skip.hpp"
#include "support/scoped_environment.hpp"

// CPUOffloadPolicy. FSDP_COPY_ON_CPU makes a CPU mesh do what a mesh of GPUs does: shards and
// gradients live in other memory than what is computed on.

namespace fsdp::test {
namespace {

void offload(FullyShardOptions& options) { options.offload_policy = CPUOffloadPolicy{}; }

struct Copies : ScopedEnvironment {
  Copies() : ScopedEnvironment(Variables{{"FSDP_COPY_ON_CPU", "1"}}) {}
};

Chain offloaded_chain(const DeviceMesh& mesh, const MixedPrecisionPolicy& policy = {}) {
  auto model = plain_chain();
  const FullyShardOptions options{.mesh = mesh, .mp_policy = policy, .offload_policy = CPUOffloadPolicy{}};
  for (auto& layer : model->layers) fully_shard(layer, options);
  fully_shard(model, options);
  return model;
}

at::Tensor chain_loss(Chain& model, int rank, int step = 0) {
  return model->forward(Inputs(rank, step).normal({4, 6})).square().mean();
}

FSDPModule root_of(const Chain& model) { return *find_fsdp_module(*model); }

/// Bytes of this rank's gradients.
int64_t gradient_bytes(const torch::nn::Module& module) {
  int64_t bytes = 0;
  for (const auto& parameter : module.parameters())
    if (parameter.grad().defined()) bytes += static_cast<int64_t>(to_local(parameter.grad()).nbytes());
  return bytes;
}

}  // namespace

TEST_CASE("offloaded models train as the plain one", "[offload]") {
  const Copies copies;
  for (Training training : {Training{.world_size = 1}, {.world_size = 2}, {.world_size = 3},
                            {.world_size = 4, .replicas = 2}, {.world_size = 2, .replicate_only = true},
                            {.world_size = 4, .reshard_after_forward = 2}, {.world_size = 2, .reshard_after_forward = false},
                            {.world_size = 2, .prefetch_distance = 0}, {.world_size = 2, .max_norm = 0.1},
                            {.world_size = 2, .launches_batches = true, .packs_below = 100},
                            {.world_size = 2, .budget_factor = 1.0}}) {
    CAPTURE(training.world_size, training.replicas, training.replicate_only, training.prefetch_distance);
    for (const auto layout : {ParamLayout::kPerParameter, ParamLayout::kFlat}) {
      training.adjust = [layout](FullyShardOptions& options) {
        offload(options);
        options.layout = layout;
      };
      CHECK(trains_like_plain([] { return chain_workload(); }, training));
    }
  }
}

TEST_CASE("accumulated gradients of offloaded parameters are the same sums in every form", "[offload]") {
  const Copies copies;
  for (const auto accumulation : {Accumulation::kReduceEach, Accumulation::kSyncAtLast, Accumulation::kAllReduceLast,
                                  Accumulation::kLastBackward})
    for (const int ranks : {1, 2, 4}) {
      CAPTURE(static_cast<int>(accumulation), ranks);
      CHECK(trains_like_plain([] { return chain_workload(); },
                              {.world_size = ranks, .replicas = ranks == 4 ? 2 : 0, .micro_batches = 3,
                               .accumulation = accumulation, .adjust = offload}));
    }
}

TEST_CASE("shards are copied once for each gather, gradients once for each reduction", "[offload]") {
  const Copies copies;
  for (const int ranks : {1, 2, 3})
    for (const auto& policy : {MixedPrecisionPolicy{}, MixedPrecisionPolicy{.param_dtype = at::kBFloat16}})
      CHECK(on_ranks(ranks, [&](Rank& rank) {
        auto model = offloaded_chain(rank.mesh(), policy);
        for (int step = 0; step < 3; ++step) {
          rank.log().clear();
          const auto before = statistics(root_of(model)).offloaded_bytes;
          model->zero_grad();
          chain_loss(model, rank.index(), step).backward();
          int64_t expected = gradient_bytes(*model);
          std::map<std::string, int64_t> shard_bytes;
          for (const auto& group : report(root_of(model)).groups) shard_bytes[group.name] = group.sharded_bytes;
          for (const auto& subject : rank.subjects_of("all_gather")) expected += shard_bytes.at(subject);
          if (ranks > 1)  // one rank gathers without a collective
            rank.check_equal(statistics(root_of(model)).offloaded_bytes - before, expected, "bytes of a step");
          rank.check_equal(report(root_of(model)).last_step.offloaded_bytes,
                           statistics(root_of(model)).offloaded_bytes - before, "of the last step");
          rank.check(gradient_bytes(*model) > 0, "there are gradients");
        }
      }));
}

TEST_CASE("home memory and the memory that is computed in are two", "[offload]") {
  const Copies copies;
  CHECK(on_ranks(1, [](Rank& rank) {
    torch::nn::Linear linear(3, 3);
    auto sharded = fully_shard(linear, {.mesh = rank.mesh(), .offload_policy = CPUOffloadPolicy{}});
    sharded.unshard();
    const auto registered = linear->parameters()[0];
    rank.check(to_local(registered).const_data_ptr() != linear->weight.const_data_ptr(), "they differ");
    rank.check_identical(linear->weight.detach(), registered.detach(), "with the same values");
    sharded.reshard();
    rank.check(!sharded.is_unsharded(), "released on one rank too");
    rank.check(registered.device().is_cpu() && !registered.is_pinned(), "nothing is pinned where there is no GPU");
  }));
}

TEST_CASE("on a mesh of CPUs nothing is copied", "[offload]") {
  CHECK(on_ranks(2, [](Rank& rank) {
    auto model = offloaded_chain(rank.mesh());
    chain_loss(model, rank.index()).backward();
    rank.check_equal(statistics(root_of(model)).offloaded_bytes, int64_t{0}, "bytes");
  }));
  CHECK(on_ranks(1, [](Rank& rank) {
    torch::nn::Linear linear(3, 3);
    fully_shard(linear, {.mesh = rank.mesh(), .offload_policy = CPUOffloadPolicy{.pin_memory = false}});
    rank.check(to_local(linear->parameters()[0]).const_data_ptr() == linear->weight.const_data_ptr(), "one rank: one memory");
  }));
  CHECK(trains_like_plain([] { return chain_workload(); }, {.adjust = offload}));
}

TEST_CASE("an offloaded group gathers and reduces as often, and holds as little", "[offload]") {
  const Copies copies;
  CHECK(on_ranks(2, [](Rank& rank) {
    auto model = offloaded_chain(rank.mesh());
    ShardedChain other(rank.mesh());
    std::vector<std::string> calls[2];
    for (int which : {0, 1}) {
      for (int step = 0; step < 2; ++step) {
        rank.log().clear();
        which == 0 ? chain_loss(model, rank.index(), step).backward() : other.loss(rank.index(), step).backward();
      }
      calls[which] = rank.calls();
    }
    rank.check_equal(calls[0], calls[1], "the collectives of a step");
    const auto ours = parameter_bytes(root_of(model)), theirs = parameter_bytes(other.root[0]);
    rank.check_equal(ours.unsharded, int64_t{0}, "released after the step");
    rank.check_equal(ours.peak_unsharded, theirs.peak_unsharded, "the peak");
  }));
}

TEST_CASE("writes through unsharded parameters reach offloaded shards", "[offload]") {
  const Copies copies;
  for (const auto dtype : {at::kFloat, at::kBFloat16})
    for (const int ranks : {1, 2})
      CHECK(on_ranks(ranks, [&](Rank& rank) {
        torch::nn::Linear linear(4, 5);
        fully_shard(linear, {.mesh = rank.mesh(), .mp_policy = {.param_dtype = dtype}, .offload_policy = CPUOffloadPolicy{}});
        const auto values = torch::arange(20.F).view({5, 4});
        torch::NoGradGuard no_grad;
        linear->weight.copy_(values);
        rank.check_identical(linear->parameters()[0].detach(), rows_of(values, rank.index(), ranks), "the shard");
        linear->parameters()[0].mul_(2);
        rank.check_identical(linear->weight.detach().to(at::kFloat), values * 2, "and the other way");
      }));
}

TEST_CASE("clipping, full parameters, state dicts and clones work on offloaded parameters", "[offload]") {
  const Copies copies;
  CHECK(on_ranks(2, [](Rank& rank) {
    auto model = offloaded_chain(rank.mesh());
    auto plain = plain_chain();
    chain_loss(model, rank.index()).backward();
    const auto expected = averaged_gradients(plain, 2);
    double squares = 0;
    for (const auto& [name, gradient] : expected) squares += gradient.square().sum().item<double>();
    const double norm = clip_grad_norm_(model->parameters(), std::sqrt(squares) / 2);
    rank.check(std::abs(norm - std::sqrt(squares)) < 1e-5 * norm, "the norm");
    check_gradients(rank, *model, expected, "clipped", 0.5);

    const auto saved = state_dict(*model);
    for (const auto& entry : saved.entries)
      rank.check_identical(entry.value().value, plain->named_parameters()[entry.key()].detach(), "saved " + entry.key());
    {
      FullParameters scope(*model);
      torch::NoGradGuard no_grad;
      rank.check_identical(model->head->weight.detach(), plain->head->weight.detach(), "the full parameter");
      model->head->weight.fill_(3);
    }
    rank.check_identical(full_tensor(model->head->weight), torch::full({2, 6}, 3.F), "written back");
    load_state_dict(*model, saved);
    rank.check_identical(full_tensor(model->head->weight), plain->head->weight.detach(), "loaded");
  }));
}

TEST_CASE("meta, rank 0's values, other dtypes, clones and adopted optimizers with offload", "[offload]") {
  const Copies copies;
  CHECK(on_ranks(2, [](Rank& rank) {
    const FullyShardOptions options{.mesh = rank.mesh(), .offload_policy = CPUOffloadPolicy{}};
    auto meta = [] {
      MetaDevice on_meta;
      return torch::nn::Linear(6, 4);
    }();
    fully_shard(meta, options);
    auto without = [] {
      MetaDevice on_meta;
      return torch::nn::Linear(6, 4);
    }();
    fully_shard(without, {.mesh = rank.mesh()});
    materialize(*meta, {.seed = 3});
    materialize(*without, {.seed = 3});
    rank.check_identical(full_tensor(meta->weight), full_tensor(without->weight), "first values");
    meta->forward(torch::ones({2, 6})).sum().backward();
    rank.check(statistics(*find_fsdp_module(*meta)).offloaded_bytes > 0, "materialised parameters are offloaded too");

    auto linear = seeded(3 + rank.index(), [] { return torch::nn::Linear(6, 4); });
    const auto first = seeded(3, [] { return torch::nn::Linear(6, 4); });
    torch::optim::SGD before(linear->parameters(), torch::optim::SGDOptions(0.5));
    auto synced = options;
    synced.sync_from_rank0 = true;
    fully_shard(linear, synced);
    rank.check_identical(full_tensor(linear->weight), first->weight.detach(), "rank 0's values");
    rank.check_equal(adopt(before), 2, "moved over");
    linear->forward(torch::ones({2, 6})).sum().backward();
    before.step();
    rank.check_close(full_tensor(linear->weight), first->weight.detach() - 1, "a step of the adopted optimizer");

    auto copy = std::dynamic_pointer_cast<torch::nn::LinearImpl>(clone(*linear));
    rank.check_identical(full_tensor(copy->weight), full_tensor(linear->weight), "the clone");
    copy->forward(torch::ones({2, 6})).sum().backward();
    rank.check(statistics(*find_fsdp_module(*copy)).offloaded_bytes > 0, "is offloaded as well");

    to(*linear, at::kDouble);
    rank.check_close(full_tensor(linear->weight), (first->weight.detach() - 1).to(at::kDouble), "as double");
    linear->zero_grad();
    linear->forward(torch::ones({2, 6}, at::kDouble)).sum().backward();
    rank.check_close(full_grad(linear->weight), torch::full({4, 6}, 2.0, at::kDouble), "its gradient");
  }));
}

TEST_CASE("a user's hook sees the gradient at home", "[offload]") {
  const Copies copies;
  CHECK(on_ranks(2, [](Rank& rank) {
    auto linear = seeded(1, [] { return torch::nn::Linear(torch::nn::LinearOptions(3, 4).bias(false)); });
    fully_shard(linear, {.mesh = rank.mesh(), .offload_policy = CPUOffloadPolicy{}});
    at::Tensor seen;
    linear->parameters()[0].register_hook([&](const at::Tensor& gradient) {
      seen = gradient;
      return gradient * 2;
    });
    linear->forward(torch::ones({1, 3})).sum().backward();
    rank.check_close(seen, torch::ones({2, 3}), "what the hook saw");
    rank.check_close(linear->parameters()[0].grad(), torch::full({2, 3}, 2.F), "what it made of it");
  }));
}

TEST_CASE("shards and gradients of a model on a GPU live in pinned host memory", "[offload][gpu]") {
  if (!torch::cuda::is_available()) {
    skip("no GPU");
    return;
  }
  const auto world = init_process_group({.backend = "nccl"});
  const auto mesh = init_device_mesh(world, {world->size()}, {"shard"}, {.device_type = at::kCUDA});
  auto model = offloaded_chain(mesh);
  auto plain = plain_chain();
  plain->to(at::kCUDA);
  torch::optim::AdamW ours(model->parameters(), 1e-2), theirs(plain->parameters(), 1e-2);
  for (int step = 0; step < 4; ++step) {
    const auto x = Inputs(0, step).normal({4, 6}).to(at::kCUDA);
    ours.zero_grad();
    theirs.zero_grad();
    model->forward(x).square().mean().backward();
    plain->forward(x).square().mean().backward();
    for (const auto& parameter : model->parameters()) {
      CHECK((parameter.is_cpu() && to_local(parameter).is_pinned()));
      CHECK((parameter.grad().is_cpu() && to_local(parameter.grad()).is_pinned()));
    }
    clip_grad_norm_(model->parameters(), 0.5);
    torch::nn::utils::clip_grad_norm_(plain->parameters(), 0.5);
    ours.step();
    theirs.step();
  }
  for (size_t i = 0; i < plain->parameters().size(); ++i)
    CHECK(torch::allclose(full_tensor(model->parameters()[i]), plain->parameters()[i], 1e-5, 1e-6));
}

}  // namespace fsdp::test
