#include <catch2/catch.hpp>

#include "support/models.hpp"
#include "support/sample.hpp"

// Activation checkpoints inside and around sharded modules: what is computed equals the plain
// model without checkpoints, and the recomputation's collectives are a part of the learned order.
namespace fsdp::test {
namespace {

enum class Around { kNothing, kParts, kBlocks, kPairs, kNested, kAll };
enum class Cut { kRoot, kBlocks, kLinears, kPairs };

constexpr Around kAllPlaces[] = {Around::kParts, Around::kBlocks, Around::kPairs, Around::kNested, Around::kAll};
constexpr Cut kAllCuts[] = {Cut::kRoot, Cut::kBlocks, Cut::kLinears, Cut::kPairs};

/// How one forward runs: the generator of its dropout (ranks that are threads share LibTorch's).
struct Way {
  Around around;
  at::Generator generator;

  template <class Function, class... Inputs>
  at::Tensor run(bool with_checkpoint, Function&& function, Inputs&&... inputs) const {
    if (!with_checkpoint) return function(inputs...);
    return activation_checkpoint({.preserve_rng_state = false, .generators = {generator}}, function, inputs...);
  }
  at::Tensor dropped(const at::Tensor& x) const { return x * torch::empty_like(x).bernoulli_(0.7, generator) / 0.7; }
};

struct Block : torch::nn::Module {
  explicit Block(int64_t width) {
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    up = register_module("up", torch::nn::Linear(width, 2 * width));
    down = register_module("down", torch::nn::Linear(2 * width, width));
    gain = register_parameter("gain", torch::ones({width}));
  }
  at::Tensor forward(const at::Tensor& x, const Way& way) {
    auto part = [this, way](const at::Tensor& in) {
      return down->forward(way.dropped(torch::tanh(up->forward(norm->forward(in)))));
    };
    const bool nested = way.around == Around::kNested;
    return way.dropped(x) * gain + way.run(way.around == Around::kParts || nested, part, x);
  }
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear up{nullptr}, down{nullptr};
  at::Tensor gain;
};

struct RecomputedNetImpl : torch::nn::Module {
  explicit RecomputedNetImpl(int count, int64_t width) : width(width) {
    in = register_module("in", torch::nn::Linear(width, width));
    for (int i = 0; i < count; ++i)
      blocks.push_back(register_module(fmt::format("block{}", i), std::make_shared<Block>(width)));
    head = register_module("head", torch::nn::Linear(width, 3));
  }
  at::Tensor forward(const at::Tensor& x, const Way& way) {
    auto all = [this, way](const at::Tensor& input) {
      auto h = torch::sin(in->forward(input));
      const bool pairs = way.around == Around::kPairs || way.around == Around::kNested;
      for (size_t i = 0; i < blocks.size(); i += pairs ? 2 : 1) {
        auto some = [blocks =
                         std::vector(blocks.begin() + i, blocks.begin() + std::min(blocks.size(), i + (pairs ? 2 : 1))),
                     way](at::Tensor g) {
          const bool each = way.around == Around::kNested;
          for (auto& block : blocks)
            g = way.run(
                each, [block, way](const at::Tensor& y) { return block->forward(y, way); }, g);
          return g;
        };
        h = way.run(pairs || way.around == Around::kBlocks, some, h);
      }
      return head->forward(h);
    };
    return way.run(way.around == Around::kAll, all, x);
  }
  int64_t width;
  torch::nn::Linear in{nullptr}, head{nullptr};
  std::vector<std::shared_ptr<Block>> blocks;
};
TORCH_MODULE(RecomputedNet);

void shard(RecomputedNet& net, Cut cut, const FullyShardOptions& options) {
  auto& blocks = net->blocks;
  for (auto& block : blocks) {
    if (cut == Cut::kLinears) {
      fully_shard(block->up, options);
      fully_shard(block->down, options);
    }
    if (cut == Cut::kLinears || cut == Cut::kBlocks) fully_shard(*block, options);
  }
  for (size_t i = 0; cut == Cut::kPairs && i + 1 < blocks.size(); i += 2) {
    const std::vector<std::shared_ptr<torch::nn::Module>> pair{blocks[i], blocks[i + 1]};
    fully_shard(pair, options);
  }
  fully_shard(net, options);
}

at::Generator generator_of(const Inputs& in) {
  return at::make_generator<at::CPUGeneratorImpl>(1000 + in.rank + 10 * in.step + 1000 * in.micro_batch);
}

at::Tensor loss_of(RecomputedNet& net, Around around, Inputs& in) {
  return net->forward(in.normal({4, net->width}), {around, generator_of(in)}).to(at::kDouble).square().mean();
}

MakeWorkload workload(Around around, Cut cut, int count = 3, int64_t width = 5) {
  return [=] {
    RecomputedNet net(count, width);
    return Workload{.module = net.ptr(),
                    .shard = [net, cut](const FullyShardOptions& options) mutable { shard(net, cut, options); },
                    .loss = [net, around](Inputs& in) mutable { return loss_of(net, around, in); }};
  };
}

void trains_like_plain_without(Around around, Cut cut, Training training, int count = 3) {
  CAPTURE(static_cast<int>(around), static_cast<int>(cut));
  training.dtype = at::kDouble;
  const auto plain = train_plain(workload(Around::kNothing, cut, count), training);
  on_ranks(training.world_size,
           [&](Rank& rank) { train_sharded(rank, workload(around, cut, count), training, plain); });
}

/// A sharded net on one rank.
struct ShardedNet {
  ShardedNet(const DeviceMesh& mesh, Around around, Cut cut, const FullyShardOptions& options = {}, int count = 4)
      : around(around), net(seeded(7, [&] { return RecomputedNet(count, 5); })) {
    auto own = options;
    own.mesh = mesh;
    shard(net, cut, own);
  }
  at::Tensor loss(int rank, int step) {
    Inputs in(rank, step);
    return loss_of(net, around, in);
  }
  /// The gradients of one step.
  std::vector<at::Tensor> step(int rank, int step) {
    net->zero_grad();
    loss(rank, step).backward();
    std::vector<at::Tensor> gradients;
    for (auto& parameter : net->parameters()) gradients.push_back(parameter.grad().clone());
    return gradients;
  }
  FSDPModule root() const { return *find_fsdp_module(*net); }

  Around around;
  RecomputedNet net;
};

void check_identical(const Rank& rank, const std::vector<at::Tensor>& actual, const std::vector<at::Tensor>& expected,
                     const std::string& what) {
  rank.check_equal(actual.size(), expected.size(), what);
  for (size_t i = 0; i < std::min(actual.size(), expected.size()); ++i)
    rank.check_identical(actual[i], expected[i], fmt::format("{}: gradient {}", what, i));
}

}  // namespace

TEST_CASE("checkpoints of every kind in every sharding train like the plain model",
          "[runtime][activation_checkpoint]") {
  Sample sample(3);
  for (int world_size : {1, 2, 3, 4})
    for (auto around : kAllPlaces)
      for (auto cut : kAllCuts)
        if (sample.takes_next()) trains_like_plain_without(around, cut, {.world_size = world_size, .steps = 3});
}

TEST_CASE("checkpoints on every mesh, reshard policy, prefetch distance and accumulation",
          "[runtime][activation_checkpoint]") {
  std::vector<Training> ways = {{.world_size = 4, .replicas = 2, .max_norm = 0.1},
                                {.world_size = 2, .replicate_only = true},
                                {.world_size = 4, .reshard_after_forward = false},
                                {.world_size = 4, .reshard_after_forward = 2},
                                {.prefetch_distance = 0},
                                {.prefetch_distance = 3},
                                {.reduce_unused = true}};
  for (auto accumulation : {Accumulation::kReduceEach, Accumulation::kSyncAtLast, Accumulation::kLastBackward})
    ways.push_back({.steps = 2, .micro_batches = 3, .accumulation = accumulation});
  Sample sample(3);
  for (auto around : {Around::kBlocks, Around::kNested, Around::kPairs})
    for (auto cut : {Cut::kBlocks, Cut::kLinears})
      for (const auto& way : ways)
        if (sample.takes_next()) trains_like_plain_without(around, cut, way);
}

TEST_CASE("with and without checkpoints gradients are identical bit for bit, mixed precision too",
          "[runtime][activation_checkpoint]") {
  const MixedPrecisionPolicy low{.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
  const MixedPrecisionPolicy exempt{.param_dtype = at::kBFloat16, .is_exempt = [](const torch::nn::Module& module) {
                                      return dynamic_cast<const torch::nn::LayerNormImpl*>(&module) != nullptr;
                                    }};
  for (const auto& policy : {MixedPrecisionPolicy{}, low, exempt})
    on_ranks(2, [&](Rank& rank) {
      Sample sample(2);
      for (auto cut : kAllCuts) {
        ShardedNet without(rank.mesh(), Around::kNothing, cut, {.mp_policy = policy});
        for (auto around : kAllPlaces) {
          if (!sample.takes_next()) continue;
          ShardedNet with(rank.mesh(), around, cut, {.mp_policy = policy});
          for (int step = 0; step < 2; ++step)
            check_identical(
                rank, with.step(rank.index(), step), without.step(rank.index(), step),
                fmt::format("around {}, cut {}, step {}", static_cast<int>(around), static_cast<int>(cut), step));
        }
      }
    });
}

TEST_CASE("the sequence of collectives is the same on all ranks, and from the second step on in every step",
          "[runtime][activation_checkpoint]") {
  using Calls = std::vector<std::string>;
  Sample sample(3);
  for (auto cut : kAllCuts)
    for (auto around : kAllPlaces)
      for (int distance : {0, 1, 2}) {
        if (!sample.takes_next()) continue;
        CAPTURE(static_cast<int>(cut), static_cast<int>(around), distance);
        std::mutex mutex;
        std::vector<std::vector<Calls>> by_rank;
        on_ranks(3, [&](Rank& rank) {
          ShardedNet sharded(rank.mesh(), around, cut);
          sharded.root().set_prefetch_distance(distance);
          std::vector<Calls> steps;
          for (int step = 0; step < 4; ++step) {
            rank.log().clear();
            sharded.step(rank.index(), step);
            steps.push_back(rank.calls());
          }
          rank.check_equal(steps[2], steps[1], "third step");
          rank.check_equal(steps[3], steps[1], "fourth step");
          std::lock_guard lock(mutex);
          by_rank.push_back(steps);
        });
        REQUIRE(by_rank.size() == 3);
        for (auto& steps : by_rank) CHECK(steps == by_rank[0]);
      }
}

TEST_CASE("in backward a group is gathered once, for its recomputation and its backward together",
          "[runtime][activation_checkpoint]") {
  struct Case {
    Around around;
    Cut cut;
    int distance;
  };
  // Two groups in one recomputation: the first waits, unsharded, for the second's backward.
  for (const auto& [around, cut, distance] :
       {Case{Around::kBlocks, Cut::kBlocks, 1}, Case{Around::kBlocks, Cut::kBlocks, 0},
        Case{Around::kParts, Cut::kBlocks, 1}, Case{Around::kPairs, Cut::kPairs, 1},
        Case{Around::kPairs, Cut::kBlocks, 1}, Case{Around::kNested, Cut::kPairs, 1}})
    on_ranks(2, [&](Rank& rank) {
      ShardedNet sharded(rank.mesh(), around, cut);
      sharded.root().set_prefetch_distance(distance);
      for (int step = 0; step < 4; ++step) {
        rank.log().clear();
        auto loss = sharded.loss(rank.index(), step);
        const auto forward = rank.subjects_of("all_gather").size();
        loss.backward();
        auto gathers = rank.subjects_of("all_gather");
        gathers.erase(gathers.begin(), gathers.begin() + forward);
        auto distinct = gathers;
        std::sort(distinct.begin(), distinct.end());
        distinct.erase(std::unique(distinct.begin(), distinct.end()), distinct.end());
        if (step >= 1)
          rank.check_equal(gathers.size(), distinct.size(),
                           fmt::format("around {}, cut {}, step {}: {}", static_cast<int>(around),
                                       static_cast<int>(cut), step, gathers));
        const size_t groups = cut == Cut::kBlocks ? 5 : 3;
        rank.check_equal(rank.subjects_of("reduce_scatter").size(), groups, "one reduction a group");
        sharded.net->zero_grad();
      }
      for (auto& module : sharded.root().sharded_modules()) rank.check(!module.is_unsharded(), "all is released");
    });
}

TEST_CASE("a second backward over a retained graph recomputes and reduces again", "[runtime][activation_checkpoint]") {
  on_ranks(2, [](Rank& rank) {
    for (auto around : kAllPlaces) {
      ShardedNet sharded(rank.mesh(), around, Cut::kBlocks);
      for (int step = 0; step < 2; ++step) {
        const auto once = sharded.step(rank.index(), step);
        sharded.net->zero_grad();
        auto loss = sharded.loss(rank.index(), step);
        loss.backward({}, /*retain_graph=*/true);
        loss.backward();
        auto parameters = sharded.net->parameters();
        for (size_t i = 0; i < once.size(); ++i)
          rank.check_close(parameters[i].grad(), once[i] * 2, "twice the gradient");
      }
    }
  });
}

TEST_CASE("frozen and unused parameters under checkpoints", "[runtime][activation_checkpoint]") {
  auto make = [](Around around) -> MakeWorkload {
    return [around] {
      RecomputedNet net(3, 5);
      for (auto& parameter : net->blocks[1]->parameters()) parameter.requires_grad_(false);
      net->blocks[2]->up->weight.requires_grad_(false);
      net->register_parameter("unused", torch::ones({3}));
      return Workload{.module = net.ptr(),
                      .shard = [net](const FullyShardOptions& options) mutable { shard(net, Cut::kBlocks, options); },
                      .loss = [net, around](Inputs& in) mutable { return loss_of(net, around, in); }};
    };
  };
  Sample sample(2);
  for (auto around : kAllPlaces)
    for (bool reduce_unused : {false, true}) {
      if (!sample.takes_next()) continue;
      const Training training{.world_size = 3, .reduce_unused = reduce_unused, .dtype = at::kDouble};
      const auto plain = train_plain(make(Around::kNothing), training);
      on_ranks(3, [&](Rank& rank) { train_sharded(rank, make(around), training, plain); });
    }
}

TEST_CASE("a scope that was open in forward is open in the recomputation", "[runtime][activation_checkpoint]") {
  // A frozen ParameterList under an operator that records nothing: the unsharded parameter in a scope only.
  struct List : torch::nn::Module {
    List() {
      frozen->append(torch::randn({6, 3}, torch::kDouble).requires_grad_(false));
      register_module("frozen", frozen);
      layer = register_module("layer", torch::nn::Linear(3, 3));
      to(torch::kDouble);
    }
    at::Tensor forward(const at::Tensor& x) {
      auto run = [this](const at::Tensor& in) {
        auto table = frozen[0] * 2;
        return torch::sin(torch::tanh(layer->forward(in)).matmul(table.t()));
      };
      return with_checkpoint ? activation_checkpoint(run, x) : run(x);
    }
    bool with_checkpoint = true;
    torch::nn::ParameterList frozen;
    torch::nn::Linear layer{nullptr};
  };
  on_ranks(2, [](Rank& rank) {
    auto plain = seeded(4, [] { return std::make_shared<List>(); });
    auto list = seeded(4, [] { return std::make_shared<List>(); });
    plain->with_checkpoint = false;
    fully_shard(*list, {.mesh = rank.mesh()});
    for (int step = 0; step < 3; ++step) {
      const auto x = Inputs(0, step, 0, at::kDouble).normal({4, 3});  // the same on both ranks
      for (auto* model : {plain.get(), list.get()}) model->zero_grad();
      plain->forward(x).sum().backward();
      call(list, x).sum().backward();
      rank.check_close(grad_dtensor_of(list->layer->weight).full_tensor(), plain->layer->weight.grad(), "gradient",
                       1e-11);
    }
  });
}

TEST_CASE("after an exception in a recomputation, on all ranks, training goes on", "[runtime][activation_checkpoint]") {
  on_ranks(2, [](Rank& rank) {
    for (auto around : {Around::kBlocks, Around::kNested}) {
      ShardedNet expected(rank.mesh(), around, Cut::kBlocks), sharded(rank.mesh(), around, Cut::kBlocks);
      sharded.step(rank.index(), 0);
      bool fail = true;
      sharded.net->blocks[1]->gain.register_hook([&](at::Tensor gradient) {
        if (fail) throw std::runtime_error("hook failed");
        return gradient;
      });
      rank.check_throws<std::exception>([&] { sharded.loss(rank.index(), 1).backward(); }, {"hook failed"}, "backward");
      fail = false;
      sharded.root().reset_iter_state();
      for (int step = 2; step < 4; ++step)
        check_identical(rank, sharded.step(rank.index(), step), expected.step(rank.index(), step), "afterwards");

      auto layer = sharded.net->blocks[0];
      int calls = 0;
      auto fails_again = [&](const at::Tensor& x) {
        if (++calls == 2) throw std::runtime_error("recomputation failed");
        return torch::tanh(layer->up->forward(x));
      };
      Inputs in(rank.index(), 0);
      rank.check_throws<std::exception>(
          [&] {
            activation_checkpoint({.preserve_rng_state = false}, fails_again, in.normal({2, 5})).sum().backward();
          },
          {"recomputation failed"}, "recomputation");
      sharded.root().reset_iter_state();
      check_identical(rank, sharded.step(rank.index(), 5), expected.step(rank.index(), 5), "and again");
    }
  });
}

TEST_CASE("an optimizer's step between forward and backward is an error under a checkpoint",
          "[runtime][activation_checkpoint]") {
  on_ranks(2, [](Rank& rank) {
    for (auto cut : {Cut::kBlocks, Cut::kRoot}) {
      ShardedNet sharded(rank.mesh(), Around::kBlocks, cut);
      sharded.step(rank.index(), 0);
      torch::optim::Adam optimizer(sharded.net->parameters(), 0.1);  // SGD writes by way of data(), which autograd does not see
      auto loss = sharded.loss(rank.index(), 1);
      optimizer.step();
      rank.check_throws<std::exception>([&] { loss.backward(); }, {}, "backward");  // autograd's own, or the checkpoint's
      sharded.root().reset_iter_state();
      sharded.step(rank.index(), 2);
    }
  });
}

}  // namespace fsdp::test
