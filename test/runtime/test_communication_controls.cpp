#include <catch2/catch.hpp>

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
    const std::set<std::string> own = {mesh.group(1)->name()};
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
    torch::nn::Linear net(1, 4);
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
