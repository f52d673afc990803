#include <catch2/catch.hpp>

#include <map>
#include <mutex>
#include <thread>

#include "support/models.hpp"

// FSDP1's vocabulary in libfsdp's words: what is set, and what that does to the collectives. That each
// row trains as FSDP1 does is test/processes/test_fsdp1.py's.
namespace fsdp::test {
namespace {

using Strategy = ShardingStrategy;
using Calls = std::vector<std::string>;

WrapPolicy each_layer() {
  return wrap_if([](const WrapCandidate& candidate) { return candidate.name.starts_with("layer"); });
}

/// Collectives of the third step.
Calls calls_of(const Rank& rank, const Fsdp1Options& options) {
  auto model = plain_chain(3);
  fully_shard_fsdp1(model, each_layer(), options);
  for (int step = 0; step < 3; ++step) {
    rank.log().clear();
    Inputs inputs(rank.index(), step);
    model->forward(inputs.normal({4, 6})).square().mean().backward();
  }
  return rank.calls();
}

int64_t count(const Calls& calls, const std::string& operation) {
  return std::count_if(calls.begin(), calls.end(), [&](const auto& call) { return call.starts_with(operation); });
}

}  // namespace

TEST_CASE("each sharding strategy has its mesh and its reshard policy", "[runtime][fsdp1]") {
  on_ranks(4, [](Rank& rank) {
    const auto flat = rank.mesh();
    const auto hybrid = rank.hybrid(2, 2);
    auto options_of = [&](Strategy strategy, const DeviceMesh& mesh) {
      return from_fsdp1({.sharding_strategy = strategy, .mesh = mesh}).options;
    };
    rank.check(!options_of(Strategy::kFullShard, flat).reshard_after_forward.is_set(), "FULL_SHARD");
    const auto zero2 = options_of(Strategy::kShardGradOp, flat).reshard_after_forward;
    rank.check(zero2.is_set() && !zero2.value(), "SHARD_GRAD_OP");
    rank.check(options_of(Strategy::kNoShard, flat).replicate_only, "NO_SHARD");
    rank.check(!options_of(Strategy::kHybridShard, hybrid).reshard_after_forward.is_set(), "HYBRID_SHARD");
    const auto hybrid2 = options_of(Strategy::kHybridShardZero2, hybrid).reshard_after_forward;
    rank.check(hybrid2.is_set() && !hybrid2.value(), "_HYBRID_SHARD_ZERO2");

    auto count_of = [&](Strategy strategy, const DeviceMesh& mesh, const std::string& operation) {
      return count(calls_of(rank, {.sharding_strategy = strategy, .mesh = mesh}), operation);
    };
    // Four groups, of which the root stays; the first layer's backward reads no weight.
    rank.check_equal(count_of(Strategy::kFullShard, flat, "all_gather"), 6, "FULL_SHARD gathers twice");
    rank.check_equal(count_of(Strategy::kShardGradOp, flat, "all_gather"), 4, "SHARD_GRAD_OP gathers once");
    rank.check_equal(count_of(Strategy::kNoShard, flat, "all_gather"), 0, "NO_SHARD gathers nothing");
    rank.check_equal(count_of(Strategy::kNoShard, flat, "all_reduce"), 4, "NO_SHARD all-reduces");
    rank.check_equal(count_of(Strategy::kHybridShard, hybrid, "all_gather"), 6, "HYBRID_SHARD gathers twice");
    rank.check_equal(count_of(Strategy::kHybridShard, hybrid, "all_reduce"), 4, "HYBRID_SHARD all-reduces");
    rank.check_equal(count_of(Strategy::kHybridShardZero2, hybrid, "all_gather"), 4, "ZERO2 gathers once");
  });
}

TEST_CASE("backward_prefetch says whether backward gathers ahead", "[runtime][fsdp1]") {
  on_ranks(2, [](Rank& rank) {
    const Calls forward{"all_gather layer0", "all_gather layer1", "all_gather layer2", "all_gather root"};
    auto backward_of = [&](BackwardPrefetch prefetch) {
      auto calls = calls_of(rank, {.mesh = rank.mesh(), .backward_prefetch = prefetch});
      rank.check_equal(Calls(calls.begin(), calls.begin() + 4), forward, "forward");
      return Calls(calls.begin() + 4, calls.end());
    };
    rank.check_equal(backward_of(BackwardPrefetch::kPre),
                     Calls{"all_gather layer2", "all_gather layer1", "reduce_scatter root", "reduce_scatter layer2",
                           "reduce_scatter layer1", "reduce_scatter layer0"},
                     "BACKWARD_PRE");
    for (auto prefetch : {BackwardPrefetch::kPost, BackwardPrefetch::kNone})
      rank.check_equal(backward_of(prefetch),
                       Calls{"reduce_scatter root", "all_gather layer2", "reduce_scatter layer2", "all_gather layer1",
                             "reduce_scatter layer1", "reduce_scatter layer0"},
                       "BACKWARD_POST and None");
  });
}

TEST_CASE("limit_all_gathers bounds how many groups are unsharded", "[runtime][fsdp1]") {
  on_ranks(2, [](Rank& rank) {
    for (bool limited : {true, false}) {
      auto model = plain_chain(4);
      fully_shard_fsdp1(model, each_layer(), {.mesh = rank.mesh(), .limit_all_gathers = limited});
      std::vector<size_t> started;
      model->after_layer = [&](int) { started.push_back(rank.subjects_of("all_gather").size()); };
      for (int step = 0; step < 2; ++step) {
        started.clear();
        rank.log().clear();
        Inputs inputs(rank.index(), step);
        model->forward(inputs.normal({4, 6})).sum().backward();
      }
      rank.check_equal(started, limited ? std::vector<size_t>{2, 3, 4, 5} : std::vector<size_t>{3, 4, 5, 5},
                       "gathers started when a layer is done");
    }
  });
}

TEST_CASE("limit_all_gathers holds the host back, however slow ranks and collectives are, and changes no order", "[runtime][fsdp1]") {
  struct Seen {
    std::vector<size_t> started;  // gathers, when a layer is done
    std::vector<std::string> gathered, reduced;
    bool operator==(const Seen&) const = default;
  };
  std::map<bool, std::vector<Seen>> by_limit;
  std::mutex mutex;
  for (const int run : {0, 1, 2})
    for (const bool limited : {true, false})
      on_ranks(2, [&](Rank& rank) {
        auto model = plain_chain(4);
        fully_shard_fsdp1(model, each_layer(), {.mesh = rank.mesh(), .limit_all_gathers = limited}, [&](FullyShardOptions& more) {
          // What arrives does so late, by chance.
          if (run > 0) more.sanitizer = SanitizerOptions{.seed = static_cast<uint64_t>(run), .max_delay = std::chrono::microseconds(2000)};
        });
        Seen seen;
        model->after_layer = [&](int layer) {
          seen.started.push_back(rank.subjects_of("all_gather").size());
          std::this_thread::sleep_for(std::chrono::milliseconds((run * 5 + rank.index() * 3 + layer) % 4));
        };
        for (int step = 0; step < 3; ++step) {
          seen.started.clear();
          rank.log().clear();
          Inputs inputs(rank.index(), step);
          model->forward(inputs.normal({4, 6})).sum().backward();
        }
        seen.gathered = rank.subjects_of("all_gather");
        seen.reduced = rank.subjects_of("reduce_scatter");
        rank.check_equal(seen.started.size(), size_t{4}, "layers");
        std::lock_guard lock(mutex);
        by_limit[limited].push_back(std::move(seen));
      });
  for (const auto& [limited, all] : by_limit) {
    CAPTURE(limited);
    REQUIRE(all.size() == 6);
    for (const auto& seen : all) CHECK(seen == all[0]);
  }
  const auto &held_back = by_limit[true][0], &ahead = by_limit[false][0];
  CHECK(held_back.started == std::vector<size_t>{2, 3, 4, 5});
  CHECK(ahead.started == std::vector<size_t>{3, 4, 5, 5});
  CHECK(held_back.gathered == ahead.gathered);
  CHECK(held_back.reduced == ahead.reduced);
}

TEST_CASE("what does not fit is refused with the way out", "[runtime][fsdp1]") {
  on_ranks(2, [](Rank& rank) {
    auto refused = [&](const Fsdp1Options& options, const std::vector<std::string>& parts) {
      rank.check_throws<UsageError>([&] { from_fsdp1(options); }, parts, parts[0]);
    };
    refused({.sharding_strategy = Strategy::kHybridShard, .mesh = rank.mesh()}, {"HYBRID_SHARD", "2-D", "hybrid_mesh"});
    refused({.mesh = rank.hybrid(1, 2)}, {"FULL_SHARD", "1-D", "replicate=1"});
    refused({.mesh = rank.mesh(), .device_id = c10::Device(at::kCUDA, 0)}, {"device_id is cuda:0", "cpu"});
    from_fsdp1({.mesh = rank.mesh(), .device_id = c10::Device(at::kCPU)});
  });
}

TEST_CASE("param_init_fn is called for what is on the meta device, before it is sharded", "[runtime][fsdp1]") {
  struct Scale : torch::nn::Module {
    explicit Scale(c10::Device device) { weight = register_parameter("weight", torch::ones({4}, device)); }
    void allocate() { parameters_["weight"] = weight = torch::full({4}, 3.0).requires_grad_(); }
    at::Tensor weight;
  };
  struct Two : torch::nn::Module {
    Two() {
      first = register_module("first", std::make_shared<Scale>(at::kMeta));
      second = register_module("second", std::make_shared<Scale>(at::kCPU));
    }
    std::shared_ptr<Scale> first, second;
  };
  on_ranks(2, [](Rank& rank) {
    const auto policy = wrap_class<Scale>();
    Two two;
    std::vector<torch::nn::Module*> seen;
    auto init = [&](torch::nn::Module& module) {
      seen.push_back(&module);
      dynamic_cast<Scale&>(module).allocate();
    };
    fully_shard_fsdp1(two, policy, {.mesh = rank.mesh(), .param_init_fn = init});
    rank.check(seen == std::vector<torch::nn::Module*>{two.first.get()}, "called for the one on meta");
    rank.check_identical(dtensor_of(two.first->weight).full_tensor(), torch::full({4}, 3.0), "its values");

    Two ignoring;
    seen.clear();
    fully_shard_fsdp1(ignoring, policy, {.mesh = rank.mesh(), .param_init_fn = init},
                      [&](FullyShardOptions& options) { options.ignored_modules = {ignoring.first}; });
    rank.check(seen.empty() && ignoring.first->weight.is_meta(), "not called for what is ignored");
    rank.check(!find_fsdp_module(*ignoring.first) && find_fsdp_module(*ignoring.second), "which is not sharded either");

    Two left;
    rank.check_throws<UsageError>(
        [&] { fully_shard_fsdp1(left, policy, {.mesh = rank.mesh(), .param_init_fn = [](torch::nn::Module&) {}}); },
        {"param_init_fn has left", "'first'"}, "left on meta");
    rank.check(!find_fsdp_module(*left.second), "nothing is sharded");
  });
}

}  // namespace fsdp::test
