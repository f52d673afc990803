// Gradients that are packed into NCCL's symmetric memory, over functions that stand in for NCCL's and note every
// reduce-scatter that is not from the same place of the same window on all ranks.
#include <catch2/catch.hpp>

#include "nccl_training.hpp"
#include "support/logged_lines.hpp"

namespace fsdp::test {
namespace {

using namespace std::chrono_literals;
using Catch::Contains;

constexpr int64_t kW = kChainWidth;

/// A chain with options of its own, all of it in symmetric memory.
struct SlotChain {
  SlotChain(FullyShardOptions options, int count = 4) : model(plain_chain(count, kW)) {
    for (auto& layer : model->layers) fully_shard(layer, options).set_symm_mem_for_comm();
    root.push_back(fully_shard(model, options));
    root[0].set_symm_mem_for_comm();
  }
  void train(const NcclRank& rank, int step, std::optional<Part> part = {}) {
    const int index = rank.world->rank(), ranks = rank.world->size();
    auto plain = plain_chain(static_cast<int>(model->layers.size()), kW);
    const auto expected = averaged_gradients(plain, ranks, step);
    Inputs inputs(index, step);
    model->forward(inputs.normal({4, kW})).square().mean().backward();
    expect_gradients(*model, expected, part.value_or(Part{index, ranks}), fmt::format("step {}", step));
    model->zero_grad();
  }
  Chain model;
  std::vector<FSDPModule> root;  // exactly one
};

/// Of four layers' and a head's gradients in double on two ranks: the largest group's is a layer's weight and, packed
/// beside it, its bias.
constexpr int64_t kDoubleBytes = (kW + 1) * kW * 8;
/// Two slots for layers with the packed bias once more, and the head's, of 16 bytes for a bias of one element.
constexpr int64_t kGatherBytes = 2 * (kW * kW + 2 * kW) * 4 + 2 * 2 * (kW * 4 + 16);

/// Two linear layers in one group, of which the second need not be used.
struct SlotPairImpl : torch::nn::Module {
  SlotPairImpl() {
    first = register_module("first", torch::nn::Linear(kW, kW));
    second = register_module("second", torch::nn::Linear(kW, kW));
  }
  at::Tensor loss(int rank, int step, bool uses_second) {
    Inputs inputs(rank, step);
    auto x = torch::tanh(first->forward(inputs.normal({4, kW})));
    if (uses_second) x = second->forward(x.to(second->weight.scalar_type()));
    return x.square().mean().to(at::kFloat);
  }
  torch::nn::Linear first{nullptr}, second{nullptr};
};
TORCH_MODULE(SlotPair);

SlotPair plain_pair(at::ScalarType second = at::kFloat) {
  auto pair = seeded(7, [] { return SlotPair(); });
  pair->second->to(second);
  return pair;
}

}  // namespace

TEST_CASE("packed gradients are reduced from windows, and are those of the plain model", "[group][nccl_slots]") {
  struct Case {
    int world_size;
    FullyShardOptions options;
    int windowed;  // reduce-scatters from windows in a step of one rank
  };
  // Of a layer the bias is packed, of the head all. What three ranks do not divide is packed too, and what is cast, and
  // what shares a flat run. The sanitizer sends copies.
  const std::vector<Case> cases = {
      {2, {}, 4 * 1 + 1},
      {3, {}, 4 * 2 + 1},
      {2, {.mp_policy = {.reduce_dtype = at::kDouble}}, 4 * 2 + 1},
      {3, {.mp_policy = {.reduce_dtype = at::kDouble}}, 4 * 2 + 1},
      {2, {.layout = ParamLayout::kFlat}, 4 * 1 + 1},
      {2, {.mp_policy = {.reduce_dtype = at::kDouble}, .sanitizer = SanitizerOptions{}}, 0}};
  for (const auto& c : cases) {
    CAPTURE(c.world_size, c.windowed);
    const NcclSubstitute nccl({.polls = 1});
    const auto errors = errors_on_nccl(
        nccl, {.world_size = c.world_size, .streams = {.max_delay = 300us}}, [&](NcclRank& rank) {
          auto options = c.options;
          options.mesh = mesh_of(rank);
          const bool is_flat = options.layout == ParamLayout::kFlat;
          SlotChain chain(options);
          for (int step = 0; step < 3; ++step)
            if (is_flat)
              chain.model->forward(Inputs(rank.world->rank(), step).normal({4, kW})).square().mean().backward();
            else
              chain.train(rank, step);
          if (!is_flat) return;
          auto plain = plain_chain(4, kW);
          const auto expected = summed_gradients(plain, c.world_size, {0, 1, 2});
          const auto found = unique_parameters(*chain.model);
          for (size_t i = 0; i < found.size(); ++i)
            expect(at::allclose(to_local(found[i].second.grad()), local_elements(found[i].second, expected[i].second), 1e-4,
                                1e-7),
                   "gradient of " + found[i].first);
        });
    CHECK(errors == no_errors(c.world_size));
    CHECK(nccl.counts().windowed_reductions == nccl.slots(c.world_size * 3 * c.windowed));
    CHECK(nccl.counts().windows == nccl.slots(c.world_size * (3 + 1)));
    CHECK(nccl.counts().bytes == 0);
    CHECK(nccl.misuses().empty());
  }
}

TEST_CASE("a factor that a program sets leaves reductions from windows to symmetric kernels", "[group][nccl_slots]") {
  const NcclSubstitute nccl;
  const auto errors = errors_on_nccl(nccl, {.world_size = 2, .streams = {.max_delay = 300us}}, [&](NcclRank& rank) {
    SlotChain chain({.mesh = mesh_of(rank)});
    chain.root[0].set_gradient_divide_factor(5);
    for (auto& layer : chain.model->layers) find_fsdp_module(*layer)->set_gradient_divide_factor(5);
    auto plain = plain_chain(4, kW);
    const auto averages = averaged_gradients(plain, 2, 0);
    NamedTensors expected;
    for (const auto& [name, gradient] : averages) expected.emplace_back(name, gradient * 2 / 5);
    chain.model->forward(Inputs(rank.world->rank(), 0).normal({4, kW})).square().mean().backward();
    expect_gradients(*chain.model, expected, {rank.world->rank(), 2}, "divided by 5");
  });
  CHECK(errors == no_errors(2));
  CHECK((nccl.counts().windowed_reductions > 0) == nccl.has_slots());
  CHECK(nccl.counts().symmetric_kernels == nccl.counts().windowed_gathers + nccl.counts().windowed_reductions);
  CHECK(nccl.misuses().empty());
}

TEST_CASE("as many slots are made as reductions may hold packed gradients, each as large as the largest group's",
          "[group][nccl_slots]") {
  for (const int buffers : {1, 2, 3}) {
    const NcclSubstitute nccl;
    const auto errors = errors_on_nccl(nccl, {.streams = {.max_delay = 300us}}, [&](NcclRank& rank) {
      SlotChain chain({.mesh = mesh_of(rank), .mp_policy = {.reduce_dtype = at::kDouble}});
      chain.root[0].set_reduce_scatter_max_input_buffers(buffers);
      for (int step = 0; step < 3; ++step) chain.train(rank, step);
      const int64_t expected = kGatherBytes + buffers * kDoubleBytes;
      const int64_t bytes = parameter_bytes(chain.root[0]).symmetric;
      expect(bytes == nccl.slots(expected), fmt::format("{} bytes by hand, not {}", expected, bytes));
      wait_for_all(rank);
      expect(nccl.counts().bytes == nccl.slots(2 * (3 + buffers) * kNcclBlock), "as NCCL counts them, on both ranks");
      wait_for_all(rank);
    });
    CHECK(errors == no_errors(2));
    CHECK(nccl.counts().windows == nccl.slots(2 * (3 + buffers)));
    CHECK(nccl.counts().windowed_reductions == nccl.slots(2 * 3 * 9));
    CHECK(nccl.misuses().empty());
  }
}

TEST_CASE("slots are added when more packed gradients may be alive, and stay when fewer may", "[group][nccl_slots]") {
  const NcclSubstitute nccl;
  const auto errors = errors_on_nccl(nccl, {.streams = {.max_delay = 300us}}, [&](NcclRank& rank) {
    SlotChain chain({.mesh = mesh_of(rank), .mp_policy = {.reduce_dtype = at::kDouble}});
    int step = 0;
    for (const int buffers : {1, 3, 2, 1, 3}) {
      chain.root[0].set_reduce_scatter_max_input_buffers(buffers);
      chain.train(rank, step++);
    }
    expect(parameter_bytes(chain.root[0]).symmetric == nccl.slots(kGatherBytes + 3 * kDoubleBytes), "three slots for gradients");
  });
  CHECK(errors == no_errors(2));
  CHECK(nccl.counts().windows == nccl.slots(2 * (3 + 3)));
  CHECK(nccl.misuses().empty());
}

TEST_CASE("ranks whose gradients differ reduce the same ones from windows", "[group][nccl_slots]") {
  struct Case {
    std::optional<at::ScalarType> reduce_dtype;
    at::ScalarType second;
    int windowed;  // in a reduction of one rank
  };
  // The biases are packed, by dtype, and all that is cast. A weight is not, though a rank that lacks its gradient
  // sends zeros from memory of its own.
  const std::vector<Case> cases = {
      {std::nullopt, at::kFloat, 1}, {at::kDouble, at::kFloat, 3}, {std::nullopt, at::kDouble, 2}};
  for (const auto& c : cases)
    for (const bool accumulates : {false, true}) {
      CAPTURE(c.windowed, accumulates);
      const NcclSubstitute nccl;
      const auto errors = errors_on_nccl(nccl, {.streams = {.max_delay = 300us}}, [&](NcclRank& rank) {
        auto pair = plain_pair(c.second);
        auto root = fully_shard(pair, {.mesh = mesh_of(rank), .mp_policy = {.reduce_dtype = c.reduce_dtype}});
        root.set_symm_mem_for_comm();
        root.set_reduce_scatter_unused_params(true);
        auto plain = plain_pair(c.second);
        const auto uses_second = [](int index, int step) { return (index + step) % 2 == 0; };
        for (int step = 0; step < 4; ++step) {
          for (int index = 0; index < 2; ++index) (plain->loss(index, step, uses_second(index, step)) / 2).backward();
          const bool reduces = !accumulates || step == 1 || step == 3;
          root.set_requires_gradient_sync(reduces);
          pair->loss(rank.world->rank(), step, uses_second(rank.world->rank(), step)).backward();
        }
        NamedTensors expected;
        for (const auto& [name, parameter] : unique_parameters(*plain)) expected.emplace_back(name, parameter.grad());
        expect_gradients(*pair, expected, {rank.world->rank(), 2}, "four micro-batches");
      });
      CHECK(errors == no_errors(2));
      CHECK(nccl.counts().windowed_reductions == nccl.slots(2 * (accumulates ? 2 : 4) * c.windowed));
      CHECK(nccl.misuses().empty());
    }
}

TEST_CASE("replicas reduce from the windows of their own ranks", "[group][nccl_slots]") {
  const NcclSubstitute nccl;
  const auto errors = errors_on_nccl(nccl, {.world_size = 4, .streams = {.max_delay = 300us}}, [&](NcclRank& rank) {
    const auto mesh = init_device_mesh(rank.world, {2, 2}, {"replicate", "shard"});
    SlotChain chain({.mesh = mesh, .mp_policy = {.reduce_dtype = at::kDouble}});
    for (int step = 0; step < 3; ++step) chain.train(rank, step, Part{rank.world->rank() % 2, 2});
    expect(parameter_bytes(chain.root[0]).symmetric == nccl.slots(kGatherBytes + kDoubleBytes), "as on two ranks");
  });
  CHECK(errors == no_errors(4));
  CHECK(nccl.counts().windows == nccl.slots(4 * (3 + 1)));
  CHECK(nccl.counts().windowed_reductions == nccl.slots(4 * 3 * 9));
  CHECK(nccl.misuses().empty());
}

TEST_CASE("groups on different meshes have slots with each communicator", "[group][nccl_slots]") {
  const NcclSubstitute nccl;
  const auto errors = errors_on_nccl(nccl, {.world_size = 4, .streams = {.max_delay = 300us}}, [&](NcclRank& rank) {
    const int index = rank.world->rank();
    const auto mesh = init_device_mesh(rank.world, {2, 2}, {"outer", "inner"});
    auto model = plain_chain(4, kW);
    // Every other layer's weight and bias are shared by pairs of ranks only.
    for (size_t i = 0; i < 4; ++i)
      fully_shard(model->layers[i], {.mesh = i % 2 == 0 ? mesh_of(rank) : mesh["inner"]}).set_symm_mem_for_comm();
    auto root = fully_shard(model, {.mesh = mesh_of(rank)});
    root.set_symm_mem_for_comm();
    for (int step = 0; step < 3; ++step) {
      model->forward(Inputs(index, step).normal({4, kW})).square().mean().backward();
      std::vector<NamedTensors> by_rank;
      for (int r = 0; r < 4; ++r) {
        auto plain = plain_chain(4, kW);
        plain->forward(Inputs(r, step).normal({4, kW})).square().mean().backward();
        auto& own = by_rank.emplace_back();
        for (const auto& [name, parameter] : unique_parameters(*plain)) own.emplace_back(name, parameter.grad());
      }
      const auto parameters = unique_parameters(*model);
      for (size_t i = 0; i < parameters.size(); ++i) {
        const auto& [name, parameter] = parameters[i];
        const bool is_paired = name.starts_with("layer1") || name.starts_with("layer3");
        const int first = is_paired ? index / 2 * 2 : 0, count = is_paired ? 2 : 4;
        auto sum = at::zeros_like(by_rank[0][i].second);
        for (int r = first; r < first + count; ++r) sum += by_rank[r][i].second;
        expect(at::allclose(to_local(parameter.grad()), rows_of(sum / count, index - first, count), 1e-4, 1e-7),
               fmt::format("step {}: gradient of {}", step, name));
      }
      model->zero_grad();
    }
  });
  CHECK(errors == no_errors(4));
  // Two layers, the head and gradients over all ranks; two layers and gradients over pairs.
  CHECK(nccl.counts().windows == nccl.slots(4 * (4 + 3)));
  CHECK(nccl.counts().windowed_reductions == nccl.slots(4 * 3 * 5));
  CHECK(nccl.misuses().empty());
}

TEST_CASE("reductions over a communicator of their own have their slots there", "[group][nccl_slots]") {
  const NcclSubstitute nccl;
  const auto errors = errors_on_nccl(nccl, {.streams = {.max_delay = 300us}}, [&](NcclRank& rank) {
    SlotChain chain({.mesh = mesh_of(rank), .mp_policy = {.reduce_dtype = at::kDouble}});
    int step = 0;
    for (const bool is_separate : {false, true, false}) {
      chain.root[0].set_separate_reduce_scatter_group(is_separate);
      for (int i = 0; i < 2; ++i) chain.train(rank, step++);
      expect(parameter_bytes(chain.root[0]).symmetric == nccl.slots(kGatherBytes + kDoubleBytes), "one slot for gradients");
    }
  });
  CHECK(errors == no_errors(2));
  CHECK(nccl.counts().windows == nccl.slots(2 * (3 + 3)));
  CHECK(nccl.counts().windowed_reductions == nccl.slots(2 * 6 * 9));
  CHECK(nccl.misuses().empty());
}

TEST_CASE("without windows gradients are packed in plain memory, which one line in the log says",
          "[group][nccl_slots]") {
  const LoggedLines logged;
  const NcclSubstitute nccl({.has_windows = false});
  const auto errors = errors_on_nccl(nccl, {.world_size = 3}, [&](NcclRank& rank) {
    SlotChain chain({.mesh = mesh_of(rank)});
    for (int step = 0; step < 3; ++step) chain.train(rank, step);
    expect(parameter_bytes(chain.root[0]).symmetric == 0, "no such memory");
  });
  CHECK(errors == no_errors(3));
  CHECK(logged.count("collectives use buffers of LibTorch's allocator") == nccl.slots(1));
  CHECK(logged.count("\n") <= 1);  // by version, of which each is said once
  CHECK(nccl.counts().windowed_reductions == 0);
  CHECK(nccl.counts().bytes == 0);
  CHECK(nccl.misuses().empty());
}

TEST_CASE("memory that ends with the slots for gathers leaves gradients in plain memory", "[group][nccl_slots]") {
  // Two ranks' third slots are the last.
  const NcclSubstitute nccl({.mem_alloc_fails_at = 7});
  const auto errors = errors_on_nccl(nccl, {}, [&](NcclRank& rank) {
    SlotChain chain({.mesh = mesh_of(rank)});
    for (int step = 0; step < 3; ++step) chain.train(rank, step);
    expect(parameter_bytes(chain.root[0]).symmetric == nccl.slots(kGatherBytes), "slots for gathers");
  });
  CHECK(errors == no_errors(2));
  CHECK(nccl.counts().windows == nccl.slots(2 * 3));
  CHECK((nccl.counts().windowed_gathers > 0) == nccl.has_slots());
  CHECK(nccl.counts().windowed_reductions == 0);
  CHECK(nccl.misuses().empty());
}

TEST_CASE("reductions that are given up, or whose group goes, leave their slots to the next", "[group][nccl_slots]") {
  for (const bool group_goes : {false, true}) {
    CAPTURE(group_goes);
    const NcclSubstitute nccl;
    const auto errors = errors_on_nccl(nccl, {.streams = {.max_delay = 1ms}}, [&](NcclRank& rank) {
      SlotChain chain({.mesh = mesh_of(rank), .mp_policy = {.reduce_dtype = at::kDouble}});
      chain.root[0].set_reduce_scatter_max_input_buffers(3);
      for (int step = 0; step < 4; ++step) {
        chain.root[0].set_is_last_backward(false);
        chain.model->forward(Inputs(rank.world->rank(), step).normal({4, kW})).square().mean().backward();
        if (group_goes && step == 2) {
          // That of the first layer is the last one under way.
          chain.model->layers[0] = chain.model->replace_module("layer0", torch::nn::Linear(kW, kW));
          at::NoGradGuard no_grad;
          for (auto& parameter : chain.model->layers[0]->parameters()) parameter.zero_();
          break;
        }
        chain.root[0].reset_iter_state();
        chain.root[0].set_is_last_backward(true);
        chain.train(rank, step);
      }
      if (!group_goes) return;
      // Two of these are left, and the slot that is free is the one of the layer that went.
      chain.root[0].set_is_last_backward(true);
      chain.model->forward(Inputs(rank.world->rank(), 9).normal({4, kW})).square().mean().backward();
      auto plain = plain_chain(4, kW);
      auto expected = averaged_gradients(plain, 2, 2);
      {
        at::NoGradGuard no_grad;
        for (auto& parameter : plain->layers[0]->parameters()) parameter.zero_();
      }
      const auto more = averaged_gradients(plain, 2, 9);
      const auto found = unique_parameters(*chain.model);
      for (size_t i = 0; i < found.size(); ++i) {
        const auto& [name, parameter] = found[i];
        if (name.starts_with("layer0")) continue;
        const auto rows = rows_of(expected[i].second + more[i].second, rank.world->rank(), 2);
        expect(at::allclose(to_local(parameter.grad()), rows, 1e-4, 1e-7), "gradient of " + name);
      }
    });
    CHECK(errors == no_errors(2));
    CHECK(nccl.counts().windows == nccl.slots(2 * (3 + 3)));
    CHECK(nccl.misuses().empty());
  }
}

TEST_CASE("a rank that ends with reductions under way leaves no slot registered or allocated on any",
          "[group][nccl_slots]") {
  const NcclSubstitute nccl;
  const auto errors = errors_on_nccl(nccl, {.streams = {.max_delay = 1ms}}, [&](NcclRank& rank) {
    SlotChain chain({.mesh = mesh_of(rank), .mp_policy = {.reduce_dtype = at::kDouble}});
    chain.root[0].set_reduce_scatter_max_input_buffers(3);
    chain.train(rank, 0);
    chain.root[0].set_is_last_backward(false);
    chain.model->forward(Inputs(rank.world->rank(), 1).normal({4, kW})).square().mean().backward();
    if (rank.world->rank() == 1) throw UsageError("something of the user's went wrong");
    chain.root[0].set_is_last_backward(true);
    chain.model->forward(Inputs(rank.world->rank(), 2).normal({4, kW})).square().mean().backward();
  });
  CHECK_THAT(errors[0], Contains("ended by an exception"));
  CHECK_THAT(errors[1], Contains("went wrong"));
  CHECK(nccl.counts().bytes == 0);
  CHECK(nccl.misuses().empty());
}

TEST_CASE("a custom reduce-scatter packs gradients in memory of its own", "[group][nccl_slots]") {
  struct Passing final : ReduceScatterComm {};
  const NcclSubstitute nccl;
  const auto errors = errors_on_nccl(nccl, {}, [&](NcclRank& rank) {
    SlotChain chain({.mesh = mesh_of(rank)});
    chain.train(rank, 0);
    chain.root[0].set_custom_reduce_scatter(std::make_shared<Passing>(), Recurse::kYes);
    for (int step = 1; step < 3; ++step) chain.train(rank, step);
    expect((parameter_bytes(chain.root[0]).symmetric > 0) == nccl.has_slots(), "gathers are in slots still");
  });
  CHECK(errors == no_errors(2));
  CHECK(nccl.counts().windowed_reductions == nccl.slots(2 * 5));
  CHECK(nccl.misuses().empty());
}

}  // namespace fsdp::test
