#include <catch2/catch.hpp>

#include "comm/forwarding.hpp"
#include "comm/work.hpp"
#include "support/models.hpp"

// Averages inside the collective, where a group offers them.

namespace fsdp::test {
namespace {

struct Launches {
  int scaled_scatters = 0, scaled_reduces = 0, scatters = 0, reduces = 0;
  bool operator==(const Launches&) const = default;
};

/// Multiplies what a rank brings before another communicator sums it, and counts both kinds of launches.
class Scaling final : public ForwardingCommunicator {
 public:
  Scaling(std::shared_ptr<Communicator> inner, std::shared_ptr<Launches> launches)
      : ForwardingCommunicator(std::move(inner)), launches_(std::move(launches)) {}

  bool scales_sums(const ScaledSum& sum) const override { return at::isFloatingType(sum.dtype); }
  std::shared_ptr<Work> start_reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op,
                                             std::string_view subject) override {
    ++launches_->scatters;
    return ForwardingCommunicator::start_reduce_scatter(output, input, op, subject);
  }
  std::shared_ptr<Work> start_all_reduce(const at::Tensor& tensor, ReduceOp op, std::string_view subject) override {
    ++launches_->reduces;
    return ForwardingCommunicator::start_all_reduce(tensor, op, subject);
  }
  std::shared_ptr<Work> start_scaled_reduce_scatter(std::span<const at::Tensor> outputs,
                                                    std::span<const at::Tensor> inputs, double scale,
                                                    std::string_view subject) override {
    ++launches_->scaled_scatters;
    for (size_t i = 0; i < outputs.size(); ++i)
      inner().start_reduce_scatter(outputs[i], inputs[i] * scale, ReduceOp::kSum, subject)->wait();
    return completed_work();
  }
  std::shared_ptr<Work> start_scaled_all_reduce(const at::Tensor& tensor, double scale,
                                                std::string_view subject) override {
    ++launches_->scaled_reduces;
    inner().start_all_reduce(tensor.mul_(scale), ReduceOp::kSum, subject)->wait();
    return completed_work();
  }
  std::shared_ptr<Communicator> split(std::span<const int> ranks, const std::string& name) override {
    auto part = inner().split(ranks, name);
    return part ? std::make_shared<Scaling>(std::move(part), launches_) : nullptr;
  }

 private:
  std::shared_ptr<Launches> launches_;
};

/// A layer [4, 1] whose gradient on rank r is `values(r)` everywhere.
struct Layer {
  torch::nn::Linear net = seeded(5, [] { return torch::nn::Linear(torch::nn::LinearOptions(1, 4).bias(false)); });
  void backward(double value) { (net->forward(torch::ones({1, 1}, net->weight.options())) * value).sum().backward(); }
  double gradient() {
    const auto whole = grad_dtensor_of(net->weight).full_tensor().to(at::kDouble);
    const double first = whole.flatten()[0].item<double>();
    return whole.eq(first).all().item<bool>() ? first : std::nan("");
  }
};

DeviceMesh scaling_mesh(const Rank& rank, std::shared_ptr<Launches> launches, int64_t replicas) {
  const auto world = std::make_shared<Scaling>(rank.world(), std::move(launches));
  if (replicas == 1) return init_device_mesh(world, {rank.size()}, {"shard"});
  return init_device_mesh(world, {replicas, rank.size() / replicas}, {"replicate", "shard"});
}

TEST_CASE("where a group multiplies in the collective, the last collective of a reduction averages",
          "[group][scaled_reductions]") {
  CHECK(on_ranks(4, [](Rank& rank) {
    const std::pair<int64_t, Launches> cases[] = {
        {1, {.scaled_scatters = 1}}, {2, {.scaled_reduces = 1, .scatters = 1}}, {4, {.scaled_reduces = 1}}};
    for (const auto& [replicas, expected] : cases) {
      const auto launches = std::make_shared<Launches>();
      Layer layer;
      fully_shard(layer.net, {.mesh = scaling_mesh(rank, launches, replicas)});
      layer.backward(rank.index() + 1.0);
      rank.check_equal(layer.gradient(), 2.5, fmt::format("the mean of 1 to 4 with {} replicas", replicas));
      rank.check(*launches == expected, fmt::format("each sum once with {} replicas", replicas));
    }
  }));
}

TEST_CASE("sums of several backwards are divided once, across replicas too", "[group][scaled_reductions]") {
  CHECK(on_ranks(4, [](Rank& rank) {
    const auto launches = std::make_shared<Launches>();
    Layer layer;
    auto module = fully_shard(layer.net, {.mesh = scaling_mesh(rank, launches, 2)});
    module.set_requires_all_reduce(false);
    layer.backward(rank.index() + 1.0);
    module.set_requires_all_reduce(true);
    layer.backward(10.0);
    rank.check_equal(layer.gradient(), 12.5, "2.5 + 10");
    rank.check(*launches == Launches{.scaled_reduces = 1, .scatters = 2}, "one average");
  }));
}

TEST_CASE("a forced sum, a factor of 1, float16 and a hook of one's own are not scaled in the collective",
          "[group][scaled_reductions]") {
  CHECK(on_ranks(2, [](Rank& rank) {
    struct Case {
      std::string name;
      std::function<void(FSDPModule)> set;
      double expected;
      at::ScalarType dtype = at::kFloat;
    };
    const Case cases[] = {
        {"forced sum", [](FSDPModule module) { module.set_force_sum_reduction_for_comms(true); }, 1.5},
        {"a factor of 1", [](FSDPModule module) { module.set_gradient_divide_factor(1); }, 3},
        {"float16", [](FSDPModule) {}, 1.5, at::kHalf},
        {"a hook",
         [](FSDPModule module) {
           module.set_all_reduce_hook([](const AllReduceCall& call) {
             return AllReduceResult{.gradients = call.gradients / call.divide_factor};
           });
         },
         1.5}};
    for (const auto& c : cases) {
      const auto launches = std::make_shared<Launches>();
      Layer layer;
      layer.net->to(c.dtype);
      c.set(fully_shard(layer.net, {.mesh = scaling_mesh(rank, launches, 1)}));
      layer.backward(rank.index() + 1.0);
      rank.check_equal(layer.gradient(), c.expected, c.name);
      rank.check(*launches == Launches{.scatters = 1}, c.name + ": a plain sum");
    }
  }));
}

TEST_CASE("a factor that a program sets is the collective's, in bfloat16 too", "[group][scaled_reductions]") {
  CHECK(on_ranks(2, [](Rank& rank) {
    const auto launches = std::make_shared<Launches>();
    Layer layer;
    layer.net->to(at::kBFloat16);
    fully_shard(layer.net, {.mesh = scaling_mesh(rank, launches, 1)}).set_gradient_divide_factor(8);
    layer.backward(rank.index() + 1.0);
    rank.check_equal(layer.gradient(), 0.375, "3 / 8");
    rank.check(*launches == Launches{.scaled_scatters = 1}, "in the collective");
  }));
}

}  // namespace
}  // namespace fsdp::test
