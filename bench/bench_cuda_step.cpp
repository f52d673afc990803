// The C++ side of cuda_step: training steps of a Llama on a GPU, sharded by the library. One process, asked by the conductor
// with the same requests as bench/pytorch/cuda_step.py.
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/profiler_kineto.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <iostream>
#include <optional>
#include <set>
#include <string>

#include "bench_device.hpp"
#include "bench_worker.hpp"
#include "fsdp/dtensor.hpp"
#include "fsdp/error.hpp"
#include "fsdp/process_group.hpp"
#include "fsdp/timeline.hpp"
#include "llama_model.hpp"
#include "stream_link.hpp"

namespace fsdp::bench {
namespace {

using Json = nlohmann::json;
constexpr int64_t kLongestSequence = 2048;

/// AdamW of torch.optim with fused=True, on this rank's pieces.
class FusedAdamW {
 public:
  explicit FusedAdamW(const torch::nn::Module& model) : parameters_(model.parameters()) {
    for (const auto& parameter : parameters_) {
      const auto local = to_local(parameter.detach());
      locals_.push_back(local);
      means_.push_back(at::zeros_like(local));
      squares_.push_back(at::zeros_like(local));
      steps_.push_back(at::zeros({}, local.options().dtype(at::kFloat)));
    }
  }

  void step() {
    const at::NoGradGuard no_grad;
    std::vector<at::Tensor> gradients;
    for (const auto& parameter : parameters_) gradients.push_back(to_local(parameter.grad()));
    at::_foreach_add_(steps_, 1);
    at::_fused_adamw_(locals_, gradients, means_, squares_, {}, steps_, /*lr=*/1e-5, /*beta1=*/0.9, /*beta2=*/0.999,
                      /*weight_decay=*/0.01, /*eps=*/1e-8, /*amsgrad=*/false, /*maximize=*/false);
  }

 private:
  std::vector<at::Tensor> parameters_, locals_, means_, squares_, steps_;
};

LlamaSizes sizes_of(const Json& shape) {
  return {.blocks = shape.at("blocks"),
          .dim = shape.at("dim"),
          .hidden = shape.at("hidden"),
          .vocabulary = shape.at("vocabulary"),
          .heads = shape.at("heads"),
          .key_value = shape.value("key_value", shape.at("dim").get<int64_t>())};
}

/// A network whose collectives take no time but that of copying this rank's own bytes.
std::shared_ptr<Communicator> fake_world(int ranks, c10::Device device) {
  return stream_link({.network = {.world_size = ranks}, .device = device, .spin = [](double) {}});
}

class CudaStep {
 public:
  explicit CudaStep(const Json& request)
      : device_(current_device(request.at("device") == "cuda" ? c10::DeviceType::CUDA : c10::DeviceType::CPU)) {
    if (request.at("world") == "fake")
      world_ = fake_world(request.at("ranks"), device_);
    else if (request.at("world") == "one")
      world_ = single_world();
    else
      world_ = join_world(device_.is_cpu() ? "gloo" : "nccl");
    has_optimizer_ = request.at("world") != "fake" && request.value("optimizer", true);
    mesh_ = init_device_mesh(world_, {world_->size()}, {"shard"}, {.device_type = device_.type()});
  }

  Json answer(const Json& request) {
    const std::string what = request.at("do");
    if (what == "make") return make(request);
    if (what == "drop") return drop();
    if (what == "memory") return memory(request);
    if (what == "warm") return warm(request);
    if (what == "time") return time(request);
    if (what == "profile") return profile(request);
    throw UsageError("fsdp_bench_cuda_step: it cannot " + what);
  }

  Json about() const { return {{"device", c10::DeviceTypeName(device_.type())}, {"ranks", world_->size()}}; }

 private:
  static std::shared_ptr<Communicator> single_world() {
    return init_process_group({.backend = "single", .world_size = 1});
  }

  Json make(const Json& request) {
    optimizer_.reset();
    model_ = nullptr;
    const auto sizes = sizes_of(request.at("shape"));
    vocabulary_ = sizes.vocabulary;
    model_ = sharded_llama(sizes, mesh_);
    if (has_optimizer_) optimizer_.emplace(*model_);
    int64_t parameters = 0;
    for (const auto& parameter : model_->parameters()) parameters += parameter.numel();
    return {{"parameters", parameters}};
  }

  Json drop() {
    optimizer_.reset();
    model_ = nullptr;
    return {{"left_bytes", forget_peak()}};
  }

  void step(const at::Tensor& tokens) {
    model_->loss(tokens).backward();
    if (optimizer_) optimizer_->step();
    model_->zero_grad();
  }

  at::Tensor tokens_of(int64_t number) const {
    torch::manual_seed(world_->rank());
    const int64_t rows = std::max<int64_t>(1, number / kLongestSequence);
    return at::randint(vocabulary_, {rows, number / rows}, at::TensorOptions(at::kLong)).to(device_);
  }

  Json warm(const Json& request) {
    const auto tokens = tokens_of(request.at("tokens"));
    for (int turn = 0; turn < request.at("steps").get<int>(); ++turn) step(tokens);
    synchronize(device_);
    return {{"loss", model_->loss(tokens).item<double>()}};
  }

  Json time(const Json& request) {
    const auto tokens = tokens_of(request.at("tokens"));
    const int steps = request.at("steps");
    synchronize(device_);
    std::vector<Mark> marks;
    const auto begin = std::chrono::steady_clock::now();
    marks.push_back(mark());
    for (int turn = 0; turn < steps; ++turn) {
      step(tokens);
      marks.push_back(mark());
    }
    const std::chrono::duration<double, std::milli> issued = std::chrono::steady_clock::now() - begin;
    synchronize(device_);
    std::vector<double> ms;
    for (int turn = 0; turn < steps; ++turn) ms.push_back(between(marks[turn], marks[turn + 1]));
    return {{"ms", ms}, {"issue_ms", issued.count() / steps}};
  }

  /// Writes the profiler's trace of some steps into the request's folder, and counts a step's collectives.
  Json profile(const Json& request) {
    const auto tokens = tokens_of(request.at("tokens"));
    step(tokens);
    synchronize(device_);
    const std::string path = request.at("folder").get<std::string>() + "/" + std::to_string(world_->rank()) + ".json";
    trace_steps(tokens, request.at("steps"), path);
    const auto root = find_fsdp_module(*model_).value();
    start_timeline(root);
    step(tokens);
    const auto events = stop_timeline(root).events;
    return {{"trace", path}, {"collectives", std::count_if(events.begin(), events.end(), [](const TimelineEvent& event) {
               return event.kind == TimelineEvent::Kind::kCollective;
             })}};
  }

  void trace_steps(const at::Tensor& tokens, int steps, const std::string& path) {
    using torch::profiler::impl::ActivityType;
    const torch::profiler::impl::ProfilerConfig config(torch::profiler::impl::ProfilerState::KINETO);
    const std::set<ActivityType> activities{device_.is_cpu() ? ActivityType::CPU : ActivityType::CUDA};
    torch::autograd::profiler::prepareProfiler(config, activities);
    torch::autograd::profiler::enableProfiler(config, activities);
    for (int turn = 0; turn < steps; ++turn) step(tokens);
    synchronize(device_);
    torch::autograd::profiler::disableProfiler()->save(path);
  }

  struct Mark {
    std::chrono::steady_clock::time_point host;
    std::optional<c10::Event> device;
  };

  Mark mark() const {
    Mark made{.host = std::chrono::steady_clock::now(), .device = {}};
    if (device_.is_cpu()) return made;
    made.device.emplace(device_.type(), c10::EventFlag::BACKEND_DEFAULT);
    made.device->record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
    return made;
  }

  static double between(const Mark& from, const Mark& to) {
    if (from.device) return from.device->elapsedTime(*to.device);
    return std::chrono::duration<double, std::milli>(to.host - from.host).count();
  }

  /// Peaks of steps of each number of tokens, above what was there before.
  Json memory(const Json& request) {
    const int64_t before = drop().at("left_bytes");
    make(request);
    auto peaks = Json::array();
    for (const int64_t number : request.at("tokens").get<std::vector<int64_t>>()) {
      const auto tokens = tokens_of(number);
      for (int turn = 0; turn < 2; ++turn) step(tokens);
      const int64_t left = forget_peak() - before;
      for (int turn = 0; turn < 2; ++turn) step(tokens);
      synchronize(device_);
      peaks.push_back({{"tokens", number},
                       {"between_steps_bytes", left},
                       {"peak_bytes", peak(&Stats::allocated_bytes) - before},
                       {"reserved_bytes", peak(&Stats::reserved_bytes)}});
    }
    return {{"peaks", peaks}};
  }

  using Stats = c10::CachingDeviceAllocator::DeviceStats;
  using Bytes = c10::CachingAllocator::StatArray Stats::*;

  int64_t peak(Bytes which) const {
    if (device_.is_cpu()) return 0;
    return (c10::getDeviceAllocator(device_.type())->getDeviceStats(device_.index()).*which)[0].peak;
  }

  /// Returns the bytes there are.
  int64_t forget_peak() const {
    if (device_.is_cpu()) return 0;
    synchronize(device_);
    auto* allocator = c10::getDeviceAllocator(device_.type());
    allocator->emptyCache();
    allocator->resetPeakStats(device_.index());
    return allocator->getDeviceStats(device_.index()).allocated_bytes[0].current;
  }

  c10::Device device_;
  std::shared_ptr<Communicator> world_;
  DeviceMesh mesh_;
  bool has_optimizer_ = false;
  LlamaModel model_{nullptr};
  std::optional<FusedAdamW> optimizer_;
  int64_t vocabulary_ = 1;
};

void serve_cuda_step() {
  std::optional<CudaStep> bench;
  serve([&](const Json& request) -> Json {
    if (request.at("do") != "setup") return bench->answer(request);
    bench.emplace(request);
    return bench->about();
  });
}

}  // namespace
}  // namespace fsdp::bench

int main(int argc, char** argv) {
  const auto exit_code = fsdp::bench::answer_options(argc, argv, "the C++ worker of cuda_step");
  if (exit_code) return *exit_code;
  try {
    fsdp::bench::serve_cuda_step();
  } catch (const std::exception& error) {
    std::cerr << "fsdp_bench_cuda_step: " << error.what() << '\n';
    return 1;
  }
  return 0;
}
