#include <catch2/catch.hpp>

#include <optional>
#include <set>
#include <utility>

#include "support/models.hpp"

// How many reductions are under way, over which communicator and behind which event.

namespace fsdp::test {
namespace {

/// Counts reduce-scatters that were launched and not waited for yet.
struct Alive : ReduceScatterComm {
  struct Counted : Work {
    Counted(std::shared_ptr<Work> inner, Alive* owner) : inner(std::move(inner)), owner(owner) {}
    void wait() override {
      if (inner) inner->wait();
      owner->now -= !std::exchange(is_done, true);
    }
    bool is_completed() override { return inner->is_completed(); }
    std::shared_ptr<Work> inner;
    Alive* owner;
    bool is_done = false;
  };
  std::shared_ptr<Work> start_reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op,
                                             Communicator& group, std::string_view subject) override {
    most = std::max(most, ++now);
    return std::make_shared<Counted>(ReduceScatterComm::start_reduce_scatter(output, input, op, group, subject), this);
  }
  int now = 0, most = 0;
};

TEST_CASE("so many packed gradients are alive at a time", "[runtime][communication_controls]") {
  for (int buffers : {1, 2, 3, 8}) {
    const auto control = [buffers](FSDPModule& root) { root.set_reduce_scatter_max_input_buffers(buffers); };
    trains_like_plain(chain_with(control), {.world_size = 2});
    trains_like_plain(chain_with(control), {.world_size = 4, .replicas = 2});
    CHECK(on_ranks(2, [&](Rank& rank) {
      ShardedChain chain(rank.mesh(), 5);
      auto alive = std::make_shared<Alive>();
      chain.root[0].set_custom_reduce_scatter(alive, Recurse::kYes);
      control(chain.root[0]);
      for (int step = 0; step < 2; ++step) chain.step(rank.index(), step);
      rank.check_equal(alive->most, std::min(buffers, 6), "alive together");
      rank.check_equal(alive->now, 0, "all waited for");
    }));
  }
  on_ranks(1, [](Rank& rank) {
    ShardedChain chain(rank.mesh());
    rank.check_throws<UsageError>([&] { chain.root[0].set_reduce_scatter_max_input_buffers(0); }, {"1 buffer"}, "none");
  });
}

TEST_CASE("roots that share count packed gradients together", "[runtime][communication_controls]") {
  for (bool shares : {false, true})
    CHECK(on_ranks(2, [&](Rank& rank) {
      auto plain = plain_chain();
      auto alive = std::make_shared<Alive>();
      ShardedChain stages[] = {ShardedChain(rank.mesh()), ShardedChain(rank.mesh()), ShardedChain(rank.mesh())};
      std::vector<FSDPModule> roots;
      for (auto& stage : stages) {
        roots.push_back(stage.root[0]);
        stage.root[0].set_custom_reduce_scatter(alive, Recurse::kYes);
        stage.root[0].set_is_last_backward(false);
      }
      if (shares) share_comm_ctx(roots);
      for (int i : {0, 1, 2}) stages[i].loss(rank.index(), i).backward();
      rank.check_equal(alive->most, shares ? 1 : 3, "alive together");
      for (int i : {0, 1, 2}) {
        stages[i].root[0].set_is_last_backward(true);
        stages[i].loss(rank.index(), i).backward();
        check_gradients(rank, *stages[i].model, averaged_gradients(plain, 2, i), "two backwards of one batch", 2);
      }
      rank.check_throws<UsageError>([&] { share_comm_ctx({stages[0].layers[0]}); }, {"layer0", "root"}, "not a root");
      share_comm_ctx({});
    }));
}

TEST_CASE("reductions may have a communicator of their own", "[runtime][communication_controls]") {
  for (int world_size : {1, 2, 3, 4})
    trains_like_plain(chain_with([](FSDPModule& root) { root.set_separate_reduce_scatter_group(); }),
                      {.world_size = world_size});
  trains_like_plain(chain_with([](FSDPModule& root) { root.set_separate_reduce_scatter_group(); }),
                    {.world_size = 4, .replicas = 2});
  on_ranks(4, [](Rank& rank) {
    auto mesh = rank.hybrid(2, 2);
    ShardedChain chain(mesh);
    auto groups_of = [&](const std::string& operation) {
      rank.log().clear();
      chain.step(rank.index());
      std::set<std::string> names;
      for (const auto& call : rank.log().calls)
        if (call.operation == operation) names.insert(call.group);
      return names;
    };
    const std::set<std::string> own = {mesh.get_group(1)->name()};
    rank.check(groups_of("reduce_scatter") == own, "the mesh's");
    chain.root[0].set_separate_reduce_scatter_group(true);
    const auto separate = groups_of("reduce_scatter");
    rank.check(separate.size() == 1 && separate != own, "one of their own, for all groups");
    rank.check(groups_of("all_gather") == own, "all-gathers stay");
    chain.root[0].set_separate_reduce_scatter_group(false);
    rank.check(groups_of("reduce_scatter") == own, "the mesh's again");
    chain.root[0].set_separate_reduce_scatter_group(true);
    rank.check(groups_of("reduce_scatter") == separate, "the same as before");
  });
}

/// large0, small1 and so on, as the letters of `sizes` say.
struct UnevenImpl : torch::nn::Module {
  explicit UnevenImpl(const std::string& sizes) {
    for (const char size : sizes) {
      std::shared_ptr<torch::nn::Module> layer;
      if (size == 'L')
        layer = torch::nn::Linear(8, 8).ptr();
      else
        layer = torch::nn::LayerNorm(torch::nn::LayerNormOptions({8})).ptr();
      layers.push_back(register_module(fmt::format("{}{}", size == 'L' ? "large" : "small", layers.size()), layer));
    }
  }
  at::Tensor forward(at::Tensor x) {
    x.requires_grad_();  // so that backward reads the first layer's weight, too
    for (size_t i = 0; i < layers.size(); ++i) {
      if (i == skipped) continue;
      auto* large = layers[i]->as<torch::nn::Linear>();
      x = large != nullptr ? large->forward(x) : layers[i]->as<torch::nn::LayerNorm>()->forward(x);
    }
    return x;
  }
  std::vector<std::shared_ptr<torch::nn::Module>> layers;
  std::optional<size_t> skipped;
};
TORCH_MODULE(Uneven);

/// On a rank.
struct ShardedUneven {
  ShardedUneven(Rank& rank, const std::string& sizes, int buffers)
      : rank(rank), model(seeded(5, [&] { return Uneven(sizes); })), plain(seeded(5, [&] { return Uneven(sizes); })) {
    for (auto& layer : model->layers) fully_shard(*layer, {.mesh = rank.mesh()});
    root.push_back(fully_shard(*model, {.mesh = rank.mesh()}));
    root[0].set_reduce_scatter_max_input_buffers(buffers);
  }
  static at::Tensor loss_of(Uneven& model, int rank, int step) {
    return model->forward(Inputs(rank, step).normal({4, 8})).square().mean();
  }
  std::vector<std::string> calls_of_backward(int step) {
    auto loss = loss_of(model, rank.index(), step);
    rank.log().clear();
    loss.backward();
    return rank.calls();
  }
  void check(int step, const std::string& what) {
    plain->zero_grad();
    for (int other = 0; other < rank.size(); ++other) (loss_of(plain, other, step) / rank.size()).backward();
    NamedTensors expected;
    for (auto& [name, parameter] : unique_parameters(*plain)) expected.emplace_back(name, parameter.grad());
    check_gradients(rank, *model, expected, what);
    model->zero_grad();
  }
  Rank& rank;
  Uneven model, plain;
  std::vector<FSDPModule> root;
};

TEST_CASE("a reduction with a communicator of its own lets a gather go first that is larger than all computed before it",
          "[runtime][communication_controls]") {
  on_ranks(2, [](Rank& rank) {
    const std::vector<std::string> together = {"all_gather small3",     "all_gather large2",     "reduce_scatter large4",
                                               "all_gather small1",     "reduce_scatter small3", "all_gather large0",
                                               "reduce_scatter large2", "reduce_scatter small1", "reduce_scatter large0"};
    const std::vector<std::string> apart = {"all_gather small3",     "all_gather large2",
                                            "all_gather small1",      // when small3 is done
                                            "reduce_scatter large4",  // when large2 is used
                                            "reduce_scatter small3",  // behind it
                                            "all_gather large0",      // behind which there is nothing to hide
                                            "reduce_scatter large2", "reduce_scatter small1", "reduce_scatter large0"};
    for (bool separates : {false, true}) {
      ShardedUneven uneven(rank, "LSLSL", /*buffers=*/2);
      uneven.root[0].set_separate_reduce_scatter_group(separates);
      std::vector<std::string> calls;
      for (int step = 0; step < 3; ++step) {
        calls = uneven.calls_of_backward(step);
        uneven.check(step, fmt::format("step {}, separates: {}", step, separates));
      }
      rank.check_equal(calls, separates ? apart : together, "backward");
    }
  });
}

TEST_CASE("the gradients of as many groups wait for a gather as there are buffers", "[runtime][communication_controls]") {
  on_ranks(2, [](Rank& rank) {
    for (int buffers : {1, 3}) {
      ShardedUneven uneven(rank, "LSLSSSL", buffers);
      uneven.root[0].set_prefetch_distance(2);
      uneven.root[0].set_separate_reduce_scatter_group();
      std::vector<std::string> calls;
      for (int step = 0; step < 3; ++step) {
        calls = uneven.calls_of_backward(step);
        uneven.check(step, fmt::format("step {}, {} buffers", step, buffers));
      }
      // The end of the forward has gathered small5. In one buffer its gradients make room for those of small4.
      const std::vector<std::string> one = {
          "all_gather small4", "all_gather small3", "reduce_scatter large6", "all_gather large2",
          "all_gather small1", "reduce_scatter small5", "reduce_scatter small4", "all_gather large0"};
      const std::vector<std::string> three = {
          "all_gather small4", "all_gather small3", "reduce_scatter large6", "all_gather large2",
          "all_gather small1", "all_gather large0", "reduce_scatter small5", "reduce_scatter small4"};
      auto expected = buffers == 1 ? one : three;
      for (const char* last : {"small3", "large2", "small1", "large0"})
        expected.push_back(fmt::format("reduce_scatter {}", last));
      rank.check_equal(calls, expected, fmt::format("{} buffers", buffers));
    }
  });
}

TEST_CASE("what waits for a gather is reduced at the end of a backward that does not use it, and dropped with one that fails",
          "[runtime][communication_controls]") {
  on_ranks(2, [](Rank& rank) {
    for (bool is_manual : {false, true}) {
      ShardedUneven uneven(rank, "LSLSL", /*buffers=*/3);
      uneven.root[0].set_separate_reduce_scatter_group();
      uneven.root[0].set_manual_backward_finalization(is_manual);
      for (int step = 0; step < 6; ++step) {
        const auto skipped = step == 3 ? std::optional<size_t>(2) : std::nullopt;
        uneven.model->skipped = uneven.plain->skipped = skipped;
        const auto calls = uneven.calls_of_backward(step);
        if (is_manual) uneven.root[0].finalize_backward();
        uneven.check(step, fmt::format("step {}, manual: {}: {}", step, is_manual, calls));
      }
    }
    ShardedUneven uneven(rank, "LSLSL", /*buffers=*/3);
    uneven.root[0].set_separate_reduce_scatter_group();
    for (int step = 0; step < 2; ++step) {
      uneven.calls_of_backward(step);
      uneven.model->zero_grad();
    }
    auto& small3 = uneven.model->layers[3]->as<torch::nn::LayerNorm>()->bias;  // large4 waits then
    const auto hook = small3.register_hook([](const at::Tensor&) -> void { throw std::runtime_error("on all ranks"); });
    rank.check_throws<std::runtime_error>([&] { uneven.calls_of_backward(2); }, {"on all ranks"}, "small3");
    small3.remove_hook(hook);
    uneven.root[0].reset_iter_state();
    for (int step = 3; step < 6; ++step) {
      uneven.calls_of_backward(step);
      uneven.check(step, fmt::format("step {}, after the failure", step));
    }
  });
}

TEST_CASE("on CPU an event of the optimizer is accepted", "[runtime][communication_controls]") {
  on_ranks(2, [](Rank& rank) {
    auto plain = plain_chain();
    ShardedChain chain(rank.mesh());
    for (int step = 0; step < 3; ++step) {
      chain.model->zero_grad();
      chain.root[0].set_post_optim_event(c10::Event(c10::DeviceType::CPU));
      chain.loss(rank.index(), step).backward();
      check_gradients(rank, *chain.model, averaged_gradients(plain, 2, step), "gradients");
    }
    rank.check_throws<StateError>([&] { chain.layers[0].set_post_optim_event(c10::Event(c10::DeviceType::CPU)); },
                                  {"root"}, "not a root");
  });
}

TEST_CASE("the older name of the divide factor", "[runtime][communication_controls]") {
  on_ranks(2, [](Rank& rank) {
    auto net = seeded(5, [] { return torch::nn::Linear(1, 4); });
    fully_shard(net, {.mesh = rank.mesh()}).set_reduce_scatter_divide_factor(4);
    (net->forward(torch::ones({1, 1})) * (rank.index() + 1.0)).sum().backward();
    rank.check_close(full_grad(net->weight), torch::full({4, 1}, 0.75), "3 / 4");
  });
}

TEST_CASE("on a module without parameters every control does nothing", "[runtime][communication_controls]") {
  on_ranks(2, [](Rank& rank) {
    torch::nn::Tanh net;
    auto root = fully_shard(net, {.mesh = rank.mesh(), .all_gather_extension_fn = [](auto&, auto&) {
                                    return int8_all_gather();
                                  }});
    rank.log().clear();
    root.set_custom_all_gather(std::make_shared<AllGatherComm>());
    root.set_custom_reduce_scatter(std::make_shared<ReduceScatterComm>());
    root.set_all_reduce_hook(fp16_compress);
    root.set_manual_backward_finalization(true);
    root.finalize_backward();
    root.finalize_backward_async().wait();
    root.set_post_optim_event(c10::Event(c10::DeviceType::CPU));
    root.set_keep_unsharded_storage(true);
    root.set_reduce_scatter_max_input_buffers(2);
    root.set_separate_reduce_scatter_group();
    root.set_reduce_scatter_start(ReduceScatterStart::kFirstAfterAllGather);
    root.set_allocate_memory_from_process_group_for_comm(true);
    root.set_symm_mem_for_comm();
    share_comm_ctx({root});
    const auto input = torch::ones({2}, torch::requires_grad());
    net->forward(input).sum().backward();
    root.finalize_backward();
    root.reset_iter_state();
    rank.check(rank.log().calls.empty(), "no communication");
    rank.check_equal(parameter_bytes(root).kept, int64_t{0}, "no memory");
  });
}

}  // namespace
}  // namespace fsdp::test
