#include <catch2/catch.hpp>

#include <cmath>

#include "support/models.hpp"
#include "support/odd_model.hpp"
#include "support/scoped_environment.hpp"

// The sanitizer mode: each fault is planted and found by name; without one nothing is reported.
namespace fsdp::test {
namespace {

const SanitizerOptions kOn{.max_delay = std::chrono::microseconds(200)};

/// Three layers and a root, all sanitized.
struct Sanitized {
  explicit Sanitized(const Rank& rank, const SanitizerOptions& sanitizer = kOn)
      : model(seeded(5, [] { return Chain(); })) {
    for (auto& layer : model->layers)
      layers.push_back(fully_shard(layer, {.mesh = rank.mesh(), .sanitizer = sanitizer}));
    root.push_back(fully_shard(model, {.mesh = rank.mesh(), .sanitizer = sanitizer}));
  }
  at::Tensor loss() { return model->forward(torch::ones({2, 6})).square().mean(); }
  at::Tensor& weight() { return model->layers[1]->weight; }

  Chain model;
  std::vector<FSDPModule> layers, root;
};

float* pointer_to(const at::Tensor& tensor) { return static_cast<float*>(tensor.data_ptr()); }

void check_trains(const std::string& what, Training training, const MakeWorkload& make,
                  const std::function<void(FullyShardOptions&)>& adjust = {}) {
  CAPTURE(what);
  training.adjust = [adjust](FullyShardOptions& options) {
    options.sanitizer = kOn;
    if (adjust) adjust(options);
  };
  CHECK(trains_like_plain(make, training));
}

}  // namespace

TEST_CASE("under the sanitizer results are the unsharded model's, and nothing is reported", "[sanitizer]") {
  const auto chain = [] { return chain_workload(3, 7); };
  for (const int ranks : {1, 2, 3, 5}) check_trains("plain", {.world_size = ranks}, chain);
  check_trains("HSDP", {.world_size = 4, .replicas = 2, .max_norm = 0.1}, chain);
  check_trains("replicas only", {.world_size = 2, .replicate_only = true}, chain);
  check_trains("kept after forward over 2 ranks", {.world_size = 4, .reshard_after_forward = 2}, chain);
  check_trains("kept after forward", {.world_size = 2, .reshard_after_forward = false}, chain);
  check_trains("batched launches", {.world_size = 2, .launches_batches = true, .packs_below = 64}, chain);
  check_trains("accumulated", {.world_size = 2, .micro_batches = 3, .accumulation = Accumulation::kSyncAtLast}, chain);
  check_trains("several backwards", {.world_size = 2, .micro_batches = 2, .accumulation = Accumulation::kLastBackward},
               chain);
  check_trains("flat", {.world_size = 3}, chain,
               [](FullyShardOptions& options) { options.layout = ParamLayout::kFlat; });
  check_trains("Shard(1)", {.world_size = 3}, chain, [](FullyShardOptions& options) {
    options.shard_placement_fn = [](const std::string&, const at::Tensor& p) { return Shard{p.dim() - 1}; };
  });
}

TEST_CASE("under the sanitizer mixed precision computes what it computes without", "[sanitizer]") {
  for (const int ranks : {1, 2, 3}) {
    CAPTURE(ranks);
    CHECK(on_ranks(ranks, [](Rank& rank) {
      std::vector<std::vector<at::Tensor>> weights;
      for (const bool is_on : {false, true}) {
        auto sanitizer = kOn;
        sanitizer.is_enabled = is_on;
        auto model = seeded(5, [] { return Chain(); });
        const FullyShardOptions options{.mesh = rank.mesh(),
                                        .mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat},
                                        .sanitizer = sanitizer};
        for (auto& layer : model->layers) fully_shard(layer, options);
        fully_shard(model, options);
        torch::optim::AdamW optimizer(model->parameters(), 1e-2);
        for (int step = 0; step < 3; ++step) {
          optimizer.zero_grad();
          model->forward(Inputs(rank.index(), step).normal({4, 6})).to(at::kFloat).square().mean().backward();
          optimizer.step();
        }
        auto& of_run = weights.emplace_back();
        for (const auto& parameter : model->parameters()) of_run.push_back(parameter.detach().clone());
      }
      for (size_t i = 0; i < weights[0].size(); ++i)
        rank.check_identical(weights[1][i], weights[0][i], fmt::format("parameter {}", i));
    }));
  }
}

TEST_CASE("a pointer that is kept beyond a reshard reads NaN, and a write to it is found", "[sanitizer]") {
  CHECK(on_ranks(2, [](Rank& rank) {
    Sanitized sanitized(rank);
    sanitized.layers[1].unshard();
    auto* const kept = pointer_to(sanitized.weight());
    rank.check(!std::isnan(kept[7]), "readable while it is unsharded");
    sanitized.layers[1].reshard();
    for (int step = 0; step < 2; ++step) sanitized.loss().backward();  // others would have the memory by now
    rank.check(std::isnan(kept[7]), "poison afterwards");
    kept[7] = 1;
    rank.check_throws<StateError>([&] { sanitized.loss().backward(); },
                                  {"the sanitizer found 1 fault", fmt::format("rank {}", rank.index()),
                                   "parameter 'layer1.weight'", "byte 28 of 144", "released"},
                                  "a write to released memory");
    sanitized.loss().backward();  // told once, and the step works
  }));
}

TEST_CASE("memory of dropped gradients is poison, and a write to it is found", "[sanitizer]") {
  CHECK(on_ranks(2, [](Rank& rank) {
    Sanitized sanitized(rank);
    sanitized.loss().backward();
    auto* const kept = pointer_to(to_local(sanitized.weight().grad()));
    rank.check(!std::isnan(kept[0]), "readable while it is the gradient");
    sanitized.model->zero_grad(/*set_to_none=*/true);
    rank.check(std::isnan(kept[0]), "poison afterwards");
    kept[0] = 1;
    rank.check_throws<StateError>([&] { sanitized.root[0].reshard(); }, {"reduced gradients of 'layer1'"},
                                  "a write to a dropped gradient");
  }));
}

TEST_CASE("a write to an unsharded parameter that passes no operator is found by name", "[sanitizer]") {
  for (const int ranks : {1, 2, 3}) {
    CAPTURE(ranks);
    CHECK(on_ranks(ranks, [ranks](Rank& rank) {
      Sanitized sanitized(rank);
      auto& layer = sanitized.layers[1];
      const std::vector<std::string> said{"parameter 'layer1.weight'", "without an operator"};
      // With one rank the unsharded parameter is the shard, which is looked at when the next step begins.
      const auto look = [&] {
        if (ranks == 1)
          sanitized.loss().backward();
        else
          layer.reshard();
      };
      look();
      layer.unshard();
      pointer_to(sanitized.weight())[3] += 1;
      rank.check_throws<StateError>(look, said, "a raw write");
      layer.unshard();
      {
        at::NoGradGuard no_grad;
        sanitized.weight().mul_(2);
        sanitized.model->layers[1]->bias.fill_(1);
      }
      look();  // operators may
      layer.unshard();
      {
        at::NoGradGuard no_grad;
        sanitized.weight().mul_(2);
      }
      if (ranks == 1) look();
      pointer_to(sanitized.weight())[3] += 1;
      rank.check_throws<StateError>(look, said, "a raw write after an operator's");
    }));
  }
}

TEST_CASE("a raw write within a step is found at its end", "[sanitizer]") {
  CHECK(on_ranks(2, [](Rank& rank) {
    Sanitized sanitized(rank);
    sanitized.model->after_layer = [&](int layer) {
      if (layer == 1) pointer_to(sanitized.model->layers[1]->bias)[0] = 3;
    };
    rank.check_throws<StateError>([&] { sanitized.loss().backward(); }, {"parameter 'layer1.bias'", "without an operator"},
                                  "a raw write in forward");
    sanitized.model->after_layer = {};
    rank.check(sharded(sanitized.weight()).grad().defined(), "the step was complete");
    sanitized.loss().backward();
  }));
}

TEST_CASE("a raw write to a sharded parameter is found when the next step begins", "[sanitizer]") {
  for (const int ranks : {1, 2}) {
    CAPTURE(ranks);
    CHECK(on_ranks(ranks, [](Rank& rank) {
      Sanitized sanitized(rank);
      sanitized.loss().backward();
      pointer_to(to_local(sharded(sanitized.weight())))[0] = 7;
      rank.check_throws<StateError>([&] { sanitized.loss(); },
                                    {"parameter 'layer1.weight'", "this rank's values", "without an operator"}, "a raw write");
      {
        at::NoGradGuard no_grad;
        sharded(sanitized.weight()).mul_(0.5);
        sharded(sanitized.weight()).data().add_(1);
      }
      sanitized.loss().backward();
    }));
  }
}

TEST_CASE("a shard that changes while it is gathered is found", "[sanitizer]") {
  CHECK(on_ranks(2, [](Rank& rank) {
    Sanitized sanitized(rank);
    auto gather = sanitized.layers[1].unshard_async();
    pointer_to(to_local(sharded(sanitized.weight())))[0] += 1;
    gather.wait();
    rank.check_throws<StateError>([&] { sanitized.layers[1].reshard(); },
                                  {"all_gather of 'layer1'", "its input was changed"}, "a write to what is sent");
  }));
}

TEST_CASE("every access to a released parameter's memory is an error with its name", "[sanitizer]") {
  CHECK(on_ranks(2, [](Rank& rank) {
    Sanitized sanitized(rank);
    const auto& weight = sanitized.weight();
    const std::vector<std::pair<std::string, std::function<void()>>> accesses{
        {"data_ptr()", [&] { weight.data_ptr(); }},
        {"data_ptr<T>()", [&] { weight.data_ptr<float>(); }},
        {"const_data_ptr()", [&] { weight.const_data_ptr(); }},
        {"const_data_ptr<T>()", [&] { weight.const_data_ptr<float>(); }},
        {"mutable_data_ptr()", [&] { weight.mutable_data_ptr(); }},
        {"mutable_data_ptr<T>()", [&] { weight.mutable_data_ptr<float>(); }},
        {"accessor", [&] { weight.accessor<float, 2>(); }},
        {"const accessor", [&] { weight.accessor<const float, 2>(); }},
        {"packed_accessor", [&] { weight.packed_accessor64<float, 2>(); }},
        {"storage().data()", [&] { weight.storage().data(); }},
        {"storage().mutable_data()", [&] { weight.storage().mutable_data(); }},
        {"storage().data_ptr()", [&] { weight.storage().data_ptr(); }},
        {"storage().mutable_data_ptr()", [&] { weight.storage().mutable_data_ptr(); }},
        {"a view", [&] { weight.detach().t().data_ptr<float>(); }},
    };
    for (const bool has_trained : {false, true}) {
      if (has_trained) sanitized.loss().backward();
      for (const auto& [name, access] : accesses)
        rank.check_throws<c10::Error>(access, {"'layer1.weight'", "released", "unshard()"}, name);
      sanitized.layers[1].unshard();
      for (const auto& [name, access] : accesses) access();
      sanitized.layers[1].reshard();
    }
  }));
}

TEST_CASE("FSDP_SANITIZE turns the mode on, and the option turns it off", "[sanitizer]") {
  const auto finds_it = [](Rank& rank, const std::optional<SanitizerOptions>& sanitizer) {
    auto model = seeded(5, [] { return Chain(); });
    auto root = fully_shard(model, {.mesh = rank.mesh(), .sanitizer = sanitizer});
    root.unshard();
    pointer_to(model->head->weight)[0] += 1;
    try {
      root.reshard();
    } catch (const StateError&) {
      return true;
    }
    return false;
  };
  for (const bool is_on : {false, true}) {
    CAPTURE(is_on);
    const ScopedEnvironment set(is_on ? Variables{{"FSDP_SANITIZE", "1"}, {"FSDP_SANITIZE_SEED", "12"}} : Variables{});
    CHECK(on_ranks(2, [&](Rank& rank) {
      rank.check_equal(finds_it(rank, std::nullopt), is_on, "by the environment");
      rank.check_equal(finds_it(rank, SanitizerOptions{}), true, "told to");
      rank.check_equal(finds_it(rank, SanitizerOptions{.is_enabled = false}), false, "told not to");
    }));
  }
}

TEST_CASE("the sanitizer leaves the collectives as they are", "[sanitizer]") {
  CHECK(on_ranks(2, [](Rank& rank) {
    std::vector<std::vector<std::string>> calls;
    for (const bool is_on : {false, true}) {
      auto sanitizer = kOn;
      sanitizer.is_enabled = is_on;
      Sanitized sanitized(rank, sanitizer);
      rank.log().clear();
      for (int step = 0; step < 3; ++step) sanitized.loss().backward();
      calls.push_back(rank.calls());
    }
    rank.check_equal(calls[1], calls[0], "calls");
  }));
}

TEST_CASE("the odd model trains under the sanitizer on every mesh", "[sanitizer]") {
  on_odd_cases([](Rank& rank, const OddCase& odd) {
    const auto run = [&](bool is_on) {
      auto model = plain_odd();
      FullyShardOptions options{.mesh = odd.replicas > 0 ? rank.hybrid(odd.replicas, rank.size() / odd.replicas)
                                                         : rank.mesh(),
                                .replicate_only = odd.replicate_only,
                                .sanitizer = SanitizerOptions{.is_enabled = is_on}};
      fully_shard(model->conv, options);
      options.ignored_params = {model->plain};
      fully_shard(model, options);
      torch::optim::SGD optimizer(model->parameters(), 0.1);
      at::Tensor loss;
      for (int step = 0; step < 3; ++step) {
        Inputs inputs(rank.index(), step);
        optimizer.zero_grad();
        loss = model->loss(inputs);
        loss.backward();
        optimizer.step();
      }
      return loss.detach();
    };
    rank.check_identical(run(true), run(false), odd.name + ": loss");
  });
}

}  // namespace fsdp::test
