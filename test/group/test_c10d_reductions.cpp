// What reaches c10d's NCCL backend of a model's reductions: its own arguments, not what we believe of them.
#include <catch2/catch.hpp>

#include <numeric>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "comm/c10d/borrowed_group.hpp"
#include "comm/c10d/c10d_communicator.hpp"
#include "comm/recorded_backend.hpp"
#include "support/models.hpp"

namespace fsdp::test {
namespace {

/// Rank 0 of a world over a backend that calls itself NCCL's.
struct RecordedWorld {
  explicit RecordedWorld(int size) {
    const BackendFactory make = [log = log](const auto& /*store*/, int /*rank*/, int ranks) {
      return c10::make_intrusive<RecordedBackend>("nccl", ranks, log);
    };
    std::vector<int> ranks(size);
    std::iota(ranks.begin(), ranks.end(), 0);
    const auto store = c10::make_intrusive<c10d::HashStore>();
    comm = c10d_communicator({.backend = make(store, 0, size),
                              .world_ranks = ranks,
                              .store = store,
                              .make_backend = make,
                              .launches_batches = true});
  }

  /// Of the gradients' collectives.
  std::vector<std::string> reductions() const {
    std::vector<std::string> texts;
    for (const auto& call : *log)
      if (!call.operation.empty()) texts.push_back(call.text());
    return texts;
  }

  RecordedBackend::Log log = std::make_shared<std::vector<BackendCall>>();
  std::shared_ptr<Communicator> comm;
};

/// A layer [8, 1] whose gradient is `values` everywhere, on every rank.
double gradient_of(const RecordedWorld& world, int64_t replicas, at::ScalarType dtype,
                   const std::function<void(FSDPModule)>& set, double value) {
  auto net = seeded(5, [] { return torch::nn::Linear(torch::nn::LinearOptions(1, 8).bias(false)); });
  net->to(dtype);
  const auto ranks = world.comm->size();
  const auto mesh = replicas == 1 ? init_device_mesh(world.comm, {ranks}, {"shard"})
                                  : init_device_mesh(world.comm, {replicas, ranks / replicas}, {"replicate", "shard"});
  auto module = fully_shard(net, {.mesh = mesh});
  if (set) set(module);
  world.log->clear();
  (net->forward(torch::ones({1, 1}, net->weight.options())) * value).sum().backward();
  const auto gradient = to_local(net->weight.grad()).to(at::kDouble).flatten();
  const double first = gradient[0].item<double>();
  return gradient.eq(first).all().item<bool>() ? first : std::nan("");
}

}  // namespace

TEST_CASE("an average over a group of c10d's NCCL is NCCL's own, in every dtype, and no factor is handed on",
          "[group][c10d_reductions]") {
  for (const int ranks : {2, 4, 8})
    for (const auto dtype : {at::kBFloat16, at::kFloat, at::kDouble}) {
      CAPTURE(ranks, dtype);
      const RecordedWorld world(ranks);
      CHECK(gradient_of(world, 1, dtype, nullptr, 3) == 3);
      CHECK(world.reductions() == std::vector<std::string>{fmt::format("reduce_scatter average of {}", c10::toString(dtype))});
      CHECK(world.log->back().has_own_stream);
    }
}

TEST_CASE("any other factor divides a sum of c10d's NCCL outside of the collective", "[group][c10d_reductions]") {
  for (const auto dtype : {at::kBFloat16, at::kFloat}) {
    CAPTURE(dtype);
    const RecordedWorld world(4);
    const auto set = [](FSDPModule module) { module.set_gradient_divide_factor(8); };
    CHECK(gradient_of(world, 1, dtype, set, 3) == 1.5);
    CHECK(world.reductions() == std::vector<std::string>{fmt::format("reduce_scatter sum of {}", c10::toString(dtype))});
  }
}

TEST_CASE("float16 is divided before and behind a sum of c10d's NCCL", "[group][c10d_reductions]") {
  const RecordedWorld world(4);
  CHECK(gradient_of(world, 1, at::kHalf, nullptr, 3) == 3);
  CHECK(world.reductions() == std::vector<std::string>{"reduce_scatter sum of Half"});
}

TEST_CASE("replicas' sums over c10d's NCCL are divided once, and what is one group's average is NCCL's",
          "[group][c10d_reductions]") {
  for (const auto dtype : {at::kBFloat16, at::kFloat}) {
    CAPTURE(dtype);
    const std::string name = c10::toString(dtype);
    const RecordedWorld world(4);
    CHECK(gradient_of(world, 2, dtype, nullptr, 3) == 3);
    CHECK(world.reductions() == std::vector<std::string>{"reduce_scatter sum of " + name, "all_reduce sum of " + name});
    CHECK(gradient_of(world, 4, dtype, nullptr, 3) == 3);
    CHECK(world.reductions() == std::vector<std::string>{"all_reduce average of " + name});
  }
}

TEST_CASE("small parameters of a borrowed group over NCCL travel as one piece, and long ones by themselves",
          "[group][c10d_reductions]") {
  const auto log = std::make_shared<std::vector<BackendCall>>();
  const auto process_group = c10::make_intrusive<c10d::ProcessGroup>(c10::make_intrusive<c10d::HashStore>(), 0, 2);
  process_group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::NCCL,
                            c10::make_intrusive<RecordedBackend>("nccl", 2, log));
  process_group->setGroupName("world");
  const auto comm = borrowed_group(process_group, {.world_ranks = {0, 1}});
  static constexpr int64_t kWidth = 256;  // half of a weight is 128 KiB
  auto layers = seeded(5, [] {
    return torch::nn::Sequential(torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})),
                                 torch::nn::Linear(kWidth, kWidth),
                                 torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
  });
  fully_shard(layers, {.mesh = init_device_mesh(comm, {2}, {"shard"})});
  log->clear();
  layers->forward(torch::ones({2, kWidth})).sum().backward();
  std::vector<std::string> texts;
  for (const auto& call : *log) texts.push_back(call.text());
  CHECK(texts == std::vector<std::string>{"all_gather of Byte x 2", "reduce_scatter average of Float x 2"});
}

}  // namespace fsdp::test
