#include <torch/torch.h>

#include <map>
#include <optional>

#include "bench_models.hpp"
#include "bench_worker.hpp"
#include "fsdp/fsdp.hpp"

namespace fsdp::bench {
namespace {

/// `matrices` parameters of [dim, dim] and as many of [dim]; its loss costs little more than
/// reading them. The twin of Group in bench/pytorch/gather_bandwidth.py.
struct GroupImpl : torch::nn::Module {
  GroupImpl(int64_t dim, int64_t matrices) {
    for (int64_t i = 0; i < matrices; ++i) {
      const auto number = std::to_string(i);
      weights.push_back(register_parameter("matrix" + number, torch::ones({dim, dim})));
      weights.push_back(register_parameter("vector" + number, torch::ones({dim})));
    }
  }

  at::Tensor forward() {
    at::Tensor sum = torch::zeros({});
    for (const auto& weight : weights) sum = sum + weight.sum();
    return sum;
  }

  std::vector<at::Tensor> weights;
};
TORCH_MODULE(Group);

class GroupBench {
 public:
  GroupBench(const std::shared_ptr<Communicator>& world, const nlohmann::json& request)
      : world_(world),
        plain_(request.at("dim"), request.at("matrices")),
        group_(request.at("dim"), request.at("matrices")),
        bytes_(parameter_bytes(*plain_)),
        sharded_(fully_shard(group_, {.mesh = init_device_mesh(world, {world->size()}, {"shard"}),
                                      .reshard_after_forward = false})),
        whole_(torch::ones({bytes_ / 4})),
        piece_(torch::ones({bytes_ / 4 / world->size()})) {}

  int64_t bytes() const { return bytes_; }

  /// Seconds of one measurement, by its name in the request.
  double measure(const std::string& what) {
    static const std::map<std::string, double (GroupBench::*)()> kMeasurements = {
        {"gather", &GroupBench::gather},
        {"raw_gather", &GroupBench::raw_gather},
        {"raw_gather_fresh", &GroupBench::raw_gather_fresh},
        {"raw_reduce", &GroupBench::raw_reduce},
        {"backward", &GroupBench::backward},
        {"plain_backward", &GroupBench::plain_backward}};
    return (this->*kMeasurements.at(what))();
  }

 private:
  double gather() {
    barrier(*world_);
    return seconds([&] {
      sharded_.unshard();
      sharded_.reshard();
    });
  }

  double raw_gather() {
    barrier(*world_);
    return seconds([&] { world_->start_all_gather(whole_, piece_, "raw")->wait(); });
  }

  /// Into memory that no one has touched yet, as every gather does that frees its output.
  double raw_gather_fresh() {
    barrier(*world_);
    return seconds([&] { world_->start_all_gather(at::empty_like(whole_), piece_, "raw")->wait(); });
  }

  double raw_reduce() {
    barrier(*world_);
    return seconds(
        [&] { world_->start_reduce_scatter(piece_, whole_, ReduceOp::kSum, "raw")->wait(); });
  }

  double backward() { return time_backward(group_); }
  double plain_backward() { return time_backward(plain_); }

  /// A backward that makes every gradient and, if sharded, reduces them.
  double time_backward(Group& group) {
    group->zero_grad(/*set_to_none=*/true);
    const auto loss = group->forward();
    barrier(*world_);
    return seconds([&] { loss.backward(); });
  }

  std::shared_ptr<Communicator> world_;
  Group plain_, group_;
  int64_t bytes_;
  FSDPModule sharded_;
  at::Tensor whole_, piece_;
};

}  // namespace

void serve_gather_bandwidth() {
  at::set_num_threads(1);
  const auto world = join_world();
  std::optional<GroupBench> bench;
  serve([&](const nlohmann::json& request) -> nlohmann::json {
    if (request.at("do") == "setup") {
      bench.emplace(world, request);
      return {{"bytes", bench->bytes()}};
    }
    std::vector<double> times;
    for (int i = 0; i < request.at("times"); ++i)
      times.push_back(bench->measure(request.at("do")));
    return {{"seconds", times}};
  });
}

}  // namespace fsdp::bench
