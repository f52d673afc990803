#include <catch2/catch.hpp>

#include "support/models.hpp"

// A user's own collectives (set_custom_all_gather, set_custom_reduce_scatter).

namespace fsdp::test {
namespace {

/// Launches what the group would, and notes what it was asked.
template <class Base>
struct Counting : Base {
  at::Tensor allocate(int64_t numel, const at::TensorOptions& options) override {
    ++allocations;
    return Base::allocate(numel, options);
  }
  int allocations = 0;
};

struct CountingGather : Counting<AllGatherComm> {
  std::shared_ptr<Work> start_all_gather(const at::Tensor& output, const at::Tensor& input, Communicator& group,
                                         std::string_view subject) override {
    ++launches;
    subjects.emplace_back(subject);
    bytes += output.numel();
    is_in_place &= input.const_data_ptr() == static_cast<const char*>(output.const_data_ptr()) +
                                                 group.rank() * input.numel() &&
                   output.scalar_type() == at::kByte && output.numel() == group.size() * input.numel();
    return AllGatherComm::start_all_gather(output, input, group, subject);
  }
  int launches = 0;
  int64_t bytes = 0;
  bool is_in_place = true;
  std::vector<std::string> subjects;
};

struct CountingReduce : Counting<ReduceScatterComm> {
  std::shared_ptr<Work> start_reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op,
                                             Communicator& group, std::string_view subject) override {
    ++launches;
    bytes += static_cast<int64_t>(input.nbytes());
    return ReduceScatterComm::start_reduce_scatter(output, input, op, group, subject);
  }
  int launches = 0;
  int64_t bytes = 0;
};

/// Buffers are kept and given again once nobody refers to them.
template <class Base>
struct Pooled : Base {
  at::Tensor allocate(int64_t numel, const at::TensorOptions& options) override {
    for (const auto& buffer : pool)
      if (buffer.use_count() == 1 && buffer.storage().use_count() == 1 && buffer.numel() == numel &&
          buffer.dtype() == options.dtype())
        return buffer;
    ++made;
    return pool.emplace_back(torch::full({numel}, 77, options));
  }
  std::vector<at::Tensor> pool;
  int made = 0;
};

void use_custom(FSDPModule root, std::shared_ptr<AllGatherComm> gather, std::shared_ptr<ReduceScatterComm> reduce) {
  root.set_custom_all_gather(std::move(gather), Recurse::kYes);
  root.set_custom_reduce_scatter(std::move(reduce), Recurse::kYes);
}

/// A chain that is sharded with own collectives.
MakeWorkload custom_chain(int64_t width = 5) {
  return [width] {
    auto workload = chain_workload(3, width);
    auto module = workload.module;
    workload.shard = [module, shard = workload.shard](const FullyShardOptions& options) {
      shard(options);
      use_custom(*find_fsdp_module(*module), std::make_shared<Pooled<AllGatherComm>>(),
                 std::make_shared<Pooled<ReduceScatterComm>>());
    };
    return workload;
  };
}

TEST_CASE("own collectives with buffers of their own train like plain, in every setting", "[runtime][custom_comms]") {
  for (int world_size : {1, 2, 3, 4}) {
    trains_like_plain(custom_chain(), {.world_size = world_size});
    trains_like_plain(custom_chain(), {.world_size = world_size, .launches_batches = true});
    trains_like_plain(custom_chain(), {.world_size = world_size, .adjust = [](FullyShardOptions& options) {
                                         options.layout = ParamLayout::kFlat;
                                       }});
  }
  trains_like_plain(custom_chain(), {.world_size = 4, .replicas = 2});
  trains_like_plain(custom_chain(), {.world_size = 2, .replicate_only = true});
  for (ReshardAfterForward reshard : {ReshardAfterForward(false), ReshardAfterForward(2)}) {
    trains_like_plain(custom_chain(), {.world_size = 4, .reshard_after_forward = reshard});
    trains_like_plain(custom_chain(), {.world_size = 4, .reshard_after_forward = reshard, .launches_batches = true});
  }
  trains_like_plain(custom_chain(), {.world_size = 2, .micro_batches = 2, .accumulation = Accumulation::kReduceEach});
  trains_like_plain(custom_chain(), {.world_size = 3, .adjust = [](FullyShardOptions& options) {
                                       options.shard_placement_fn = [](auto&, const at::Tensor& parameter) {
                                         return Shard{parameter.dim() - 1};
                                       };
                                       options.all_gather_extension_fn = {};
                                     }});
}

TEST_CASE("a group's own collectives are asked once for each gather and each reduction", "[runtime][custom_comms]") {
  for (bool batches : {false, true})
    CHECK(on_ranks(
        3,
        [](Rank& rank) {
          auto plain = plain_chain();
          ShardedChain chain(rank.mesh());
          auto gather = std::make_shared<CountingGather>();
          auto reduce = std::make_shared<CountingReduce>();
          chain.layers[1].set_custom_all_gather(gather);
          chain.layers[1].set_custom_reduce_scatter(reduce);
          rank.log().clear();
          for (int step = 0; step < 3; ++step) {
            chain.model->zero_grad();
            chain.loss(rank.index(), step).backward();
            check_gradients(rank, *chain.model, averaged_gradients(plain, 3, step), "gradients");
          }
          int gathers = 0, reductions = 0;
          int64_t gathered = 0, reduced = 0;
          for (const auto& call : rank.log().calls) {
            if (call.subject != "layer1") continue;
            rank.check_equal(call.tensors, 1, "one buffer");
            if (call.operation == "all_gather") ++gathers, gathered += call.bytes;
            if (call.operation == "reduce_scatter") ++reductions, reduced += call.bytes;
          }
          rank.check_equal(gather->launches, gathers, "all-gathers");
          rank.check_equal(gather->allocations, gathers, "its buffers");
          rank.check_equal(gather->bytes, gathered, "their bytes");
          rank.check(gather->is_in_place, "in place");
          rank.check_equal(reduce->launches, reductions, "reduce-scatters");
          rank.check_equal(reduce->allocations, 2 * reductions, "input and output");
          rank.check_equal(reduce->bytes, reduced, "bytes to reduce");
          rank.check(gathers >= 6 && reductions == 3, "every step");
          for (const auto& subject : gather->subjects) rank.check_equal(subject, std::string("layer1"), "subject");

          const auto launched = gather->launches;
          chain.layers[1].set_custom_all_gather(nullptr);
          chain.layers[1].set_custom_reduce_scatter(nullptr);
          chain.step(rank.index());
          rank.check_equal(gather->launches, launched, "back to the default");
          rank.check_equal(reduce->launches, reductions, "back to the default");
        },
        {.timeout = patience(), .launches_batches = batches}));
}

TEST_CASE("one rank has no collective to customize", "[runtime][custom_comms]") {
  on_ranks(1, [](Rank& rank) {
    ShardedChain chain(rank.mesh());
    auto gather = std::make_shared<CountingGather>();
    auto reduce = std::make_shared<CountingReduce>();
    use_custom(chain.root[0], gather, reduce);
    chain.step(0);
    rank.check_equal(gather->allocations + reduce->allocations, 0, "nothing is allocated");
  });
}

TEST_CASE("a buffer of the wrong size is an error on all ranks, and nothing is lost", "[runtime][custom_comms]") {
  on_ranks(2, [](Rank& rank) {
    struct Wrong : AllGatherComm {
      at::Tensor allocate(int64_t numel, const at::TensorOptions& options) override {
        return torch::empty({numel + 1}, options);
      }
    };
    auto net = seeded(1, [] { return torch::nn::Linear(3, 2); });
    const auto expected = net->forward(torch::ones({1, 3})).detach();
    auto module = fully_shard(net, {.mesh = rank.mesh()});
    module.set_custom_all_gather(std::make_shared<Wrong>());
    rank.check_throws<UsageError>([&] { net->forward(torch::ones({1, 3})); }, {"root", "allocate", "expected"}, "too long");
    module.reset_iter_state();
    module.set_custom_all_gather(nullptr);
    rank.check_close(net->forward(torch::ones({1, 3})), expected, "afterwards");
  });
}

TEST_CASE("own collectives cannot be set inside a step", "[runtime][custom_comms]") {
  on_ranks(2, [](Rank& rank) {
    ShardedChain chain(rank.mesh());
    auto loss = chain.loss(rank.index(), 0);
    rank.check_throws<StateError>([&] { chain.root[0].set_custom_all_gather(std::make_shared<AllGatherComm>()); },
                                  {"set_custom_all_gather", "step"}, "between forward and backward");
    rank.check_throws<StateError>(
        [&] { chain.root[0].set_custom_reduce_scatter(std::make_shared<ReduceScatterComm>()); },
        {"set_custom_reduce_scatter", "step"}, "between forward and backward");
    loss.backward();
  });
}

TEST_CASE("the schedule check sees own collectives", "[runtime][custom_comms]") {
  on_ranks(2, [](Rank& rank) {
    ShardedChain chain(rank.mesh());
    set_schedule_check(chain.root[0], {.late_after = std::chrono::seconds(10),
                                       .compare_after = std::chrono::milliseconds(50)});
    use_custom(chain.root[0], std::make_shared<AllGatherComm>(), std::make_shared<ReduceScatterComm>());
    if (rank.index() == 1) chain.model->skipped = {1};
    rank.check_throws<ScheduleError>(
        [&] {
          for (int step = 0; step < 1000; ++step) chain.step(rank.index(), step);
        },
        {"layer1", "layer2"}, "other layers");
  });
}

}  // namespace
}  // namespace fsdp::test
