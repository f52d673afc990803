#include <catch2/catch.hpp>

#include "support/models.hpp"

// Hooks in place of the all-reduce across replicas (set_all_reduce_hook).

namespace fsdp::test {
namespace {

/// What the runtime does by itself.
AllReduceResult sum_and_divide(const AllReduceCall& call) {
  if (call.replicate_group)
    call.replicate_group->start_all_reduce(call.gradients, ReduceOp::kSum, call.subject)->wait();
  return {.gradients = call.gradients / call.divide_factor};
}

/// A chain with this hook on all of its groups.
MakeWorkload hooked_chain(AllReduceHook hook) {
  return [hook] {
    auto workload = chain_workload(3, 5);
    auto module = workload.module;
    workload.shard = [module, hook, shard = workload.shard](const FullyShardOptions& options) {
      shard(options);
      find_fsdp_module(*module)->set_all_reduce_hook(hook, Recurse::kYes);
    };
    return workload;
  };
}

TEST_CASE("a hook that sums and divides trains like plain on every mesh", "[runtime][all_reduce_hook]") {
  const auto make = hooked_chain(sum_and_divide);
  trains_like_plain(make, {.world_size = 4, .replicas = 2});
  trains_like_plain(make, {.world_size = 6, .replicas = 2});
  trains_like_plain(make, {.world_size = 4, .replicas = 4});
  trains_like_plain(make, {.world_size = 4, .replicas = 1});
  for (int world_size : {1, 2, 3}) trains_like_plain(make, {.world_size = world_size, .replicate_only = true});
  for (int world_size : {1, 2, 3}) trains_like_plain(make, {.world_size = world_size});
  trains_like_plain(make, {.world_size = 4, .replicas = 2, .micro_batches = 2,
                           .accumulation = Accumulation::kAllReduceLast});
  trains_like_plain(make, {.world_size = 4, .replicas = 2, .micro_batches = 2,
                           .accumulation = Accumulation::kSyncAtLast});
  trains_like_plain(make, {.world_size = 4, .replicas = 2, .micro_batches = 2,
                           .accumulation = Accumulation::kLastBackward});
  trains_like_plain(make, {.world_size = 4, .replicas = 2, .max_norm = 0.05, .launches_batches = true});
  trains_like_plain(make, {.world_size = 4, .replicas = 2, .adjust = [](FullyShardOptions& options) {
                             options.layout = ParamLayout::kFlat;
                           }});
}

TEST_CASE("compression hooks average in their dtype, within its precision", "[runtime][all_reduce_hook]") {
  struct Case {
    AllReduceHook hook;
    double tolerance;
  };
  for (const auto& [hook, tolerance] : {Case{fp16_compress, 2e-3}, Case{bf16_compress, 2e-2}})
    for (int replicas : {2, 4})
      CHECK(on_ranks(4, [&, hook = hook, tolerance = tolerance](Rank& rank) {
        auto plain = plain_chain();
        const auto mesh = rank.hybrid(replicas, 4 / replicas);
        ShardedChain chain(mesh);
        chain.root[0].set_all_reduce_hook(hook, Recurse::kYes);
        for (int step = 0; step < 3; ++step) {
          chain.model->zero_grad();
          rank.log().clear();
          chain.loss(rank.index(), step).backward();
          const auto expected = averaged_gradients(plain, 4, step);
          const auto found = unique_parameters(*chain.model);
          for (size_t i = 0; i < found.size(); ++i) {
            rank.check(found[i].second.grad().scalar_type() == at::kFloat, "back in the parameter's dtype");
            rank.check_close(grad_dtensor_of(found[i].second).full_tensor(), expected[i].second, found[i].first,
                             tolerance);
          }
          int64_t all_reduced = 0, scattered = 0;
          for (const auto& call : rank.log().calls) {
            if (call.operation == "all_reduce") all_reduced += call.bytes;
            if (call.operation == "reduce_scatter") scattered += call.bytes / (4 / replicas);
          }
          if (replicas == 2) rank.check_equal(2 * all_reduced, scattered, "half of the bytes");
          rank.check(all_reduced > 0, "all-reduced");
        }
      }));
}

TEST_CASE("a compressed gradient may stay in the hook's dtype", "[runtime][all_reduce_hook]") {
  on_ranks(2, [](Rank& rank) {
    auto net = seeded(5, [] { return torch::nn::Linear(1, 4); });
    auto module = fully_shard(net, {.mesh = rank.mesh(), .mp_policy = {.keep_low_precision_grads = true}, .replicate_only = true});
    module.set_all_reduce_hook(bf16_compress);
    (net->forward(torch::ones({1, 1})) * (rank.index() + 1.0)).sum().backward();
    rank.check(sharded(net->weight).grad().scalar_type() == at::kBFloat16, "bfloat16");
    rank.check_close(sharded(net->weight).grad().to(at::kFloat), torch::full({4, 1}, 1.5), "average");
  });
}

TEST_CASE("a hook is told what the runtime has not divided by", "[runtime][all_reduce_hook]") {
  struct Case {
    int replicas, shards;
    std::optional<at::ScalarType> dtype;
    std::optional<double> factor;
    double before, told;
  };
  // float16: f starts at 1 and doubles while it divides the factor (N, by default) and f * f is less; the rest
  // comes after.
  for (const auto& c : {Case{2, 2, {}, {}, 1, 4}, Case{2, 2, {}, 3.0, 1, 3}, Case{2, 2, at::kHalf, {}, 2, 2},
                        Case{2, 3, at::kHalf, {}, 4, 1.5}, Case{4, 2, at::kHalf, {}, 4, 2},
                        Case{4, 1, at::kHalf, 1.0, 1, 1}}) {
    const int ranks = c.replicas * c.shards;
    CHECK(on_ranks(ranks, [&](Rank& rank) {
      auto net = seeded(5, [] { return torch::nn::Linear(1, 6); });
      const auto mesh = rank.hybrid(c.replicas, c.shards);
      auto module = fully_shard(net, {.mesh = mesh, .mp_policy = {.reduce_dtype = c.dtype}});
      if (c.factor) module.set_gradient_divide_factor(*c.factor);
      int calls = 0;
      module.set_all_reduce_hook([&](const AllReduceCall& call) {
        ++calls;
        rank.check_equal(call.divide_factor, c.told, "divide factor");
        rank.check_equal(call.replicate_group->size(), c.replicas, "replicate group");
        rank.check_equal(std::string(call.subject), std::string("root"), "subject");
        rank.check(call.gradients.scalar_type() == c.dtype.value_or(at::kFloat), "reduce dtype");
        // Every rank's gradient of the bias is 2: a sum over the shard group, divided before.
        rank.check_equal(call.gradients.to(at::kFloat).max().item<double>(), 2.0 * c.shards / c.before, "what came in");
        return sum_and_divide(call);
      });
      (net->forward(torch::ones({1, 1})) * 2).sum().backward();
      rank.check_equal(calls, 1, "calls");
      rank.check_close(grad_dtensor_of(net->bias).full_tensor(), torch::full({6}, 2.0 * ranks / c.factor.value_or(ranks)),
                       "result");
    }));
  }
}

TEST_CASE("without replicas a hook gets the reduce-scatter's output and no group", "[runtime][all_reduce_hook]") {
  for (int world_size : {1, 2, 3})
    CHECK(on_ranks(world_size, [](Rank& rank) {
      // Two halves of a world that the mesh knows nothing of, as one rank's other replica would be.
      auto net = seeded(5, [] { return torch::nn::Linear(1, 6); });
      auto module = fully_shard(net, {.mesh = rank.mesh()});
      int calls = 0;
      module.set_all_reduce_hook([&](const AllReduceCall& call) -> AllReduceResult {
        ++calls;
        rank.check(call.replicate_group == nullptr, "no group");
        rank.check_equal(call.divide_factor, static_cast<double>(rank.size()), "divide factor");
        return {.gradients = call.gradients * (10 / call.divide_factor)};
      });
      for (int step = 0; step < 2; ++step) {
        net->zero_grad();
        (net->forward(torch::ones({1, 1})) * (rank.index() + 1.0)).sum().backward();
        rank.check_close(full_grad(net->weight), torch::full({6, 1}, 5.0 * (rank.size() + 1)), "ten times the average");
      }
      rank.check_equal(calls, 2, "calls");
      module.set_all_reduce_hook(fp16_compress);  // nothing to compress
      net->zero_grad();
      (net->forward(torch::ones({1, 1})) * (rank.index() + 1.0)).sum().backward();
      rank.check_close(full_grad(net->weight), torch::full({6, 1}, 0.5 * (rank.size() + 1)), "average");
    }));
}

TEST_CASE("a hook runs once for all of a backward without all-reduce", "[runtime][all_reduce_hook]") {
  on_ranks(4, [](Rank& rank) {
    auto net = seeded(5, [] { return torch::nn::Linear(1, 4); });
    auto module = fully_shard(net, {.mesh = rank.hybrid(2, 2)});
    int calls = 0;
    module.set_all_reduce_hook([&](const AllReduceCall& call) { return ++calls, sum_and_divide(call); });
    auto backward = [&] { (net->forward(torch::ones({1, 1})) * (rank.index() + 1.0)).sum().backward(); };
    module.set_requires_all_reduce(false);
    backward();
    rank.check_equal(calls, 0, "partial sums");
    module.set_requires_all_reduce(true);
    backward();
    rank.check_equal(calls, 1, "calls");
    rank.check_close(grad_dtensor_of(net->weight).full_tensor(), torch::full({4, 1}, 5.0), "both backwards");
  });
}

TEST_CASE("a hook that returns something else than gradients is an error that names the group",
          "[runtime][all_reduce_hook]") {
  on_ranks(2, [](Rank& rank) {
    auto net = seeded(5, [] { return torch::nn::Linear(1, 4); });
    auto module = fully_shard(net, {.mesh = rank.mesh(), .replicate_only = true});
    for (const auto& wrong : {at::Tensor(), torch::ones({3}), torch::ones({8, 1}), torch::ones({8}, at::kLong)}) {
      module.set_all_reduce_hook([&](const AllReduceCall&) { return AllReduceResult{.gradients = wrong}; });
      rank.check_throws<std::exception>([&] { net->forward(torch::ones({1, 1})).sum().backward(); },
                                        {"root", "all-reduce hook", "expected one dimension"}, "wrong result");
      module.reset_iter_state();
    }
    module.set_all_reduce_hook(nullptr);
    net->zero_grad();
    (net->forward(torch::ones({1, 1})) * (rank.index() + 1.0)).sum().backward();
    rank.check_close(sharded(net->bias).grad(), torch::full({4}, 1.5), "without a hook again");
  });
}

}  // namespace
}  // namespace fsdp::test
