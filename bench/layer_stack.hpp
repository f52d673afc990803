#pragma once

#include <torch/torch.h>

#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "bench_device.hpp"
#include "fsdp/fully_shard.hpp"
#include "fsdp/simulated_clock.hpp"

namespace fsdp::bench {

/// One layer's computing in one pass, in its clock's time.
struct ComputeSlice {
  size_t layer = 0;
  bool is_backward = false;
  int64_t begin_ns = 0, end_ns = 0;
};

/// What layers compute on: one operator at a time, which occupies the host until the clock has come so far.
class Machine {
 public:
  enum class Time {
    kVirtual,  ///< moves to the end at once
    kReal,     ///< spins, as who sleeps wakes up late
    kWaits,    ///< sleeps all the same: for more ranks than the machine has cores
  };
  /// device: where tensors are; on CUDA it is the device that is kept busy, in its own time, and the host goes on.
  explicit Machine(Time time, c10::Device device = c10::Device(c10::kCPU));
  c10::Device device() const { return device_; }
  void compute(size_t layer, bool is_backward, double us);
  /// Queued on the device's current stream; without a device the host is occupied.
  void occupy(double us);
  SimulatedClock& clock() { return *clock_; }
  const std::shared_ptr<SimulatedClock>& shared_clock() const { return clock_; }
  /// Empty for a device, whose slices the host does not see.
  std::vector<ComputeSlice> take_slices() { return std::exchange(slices_, {}); }

 private:
  Time time_;
  std::shared_ptr<SimulatedClock> clock_;
  c10::Device device_;
  std::optional<DeviceSpin> spin_;  // on a device
  std::vector<ComputeSlice> slices_;
};

/// A layer whose computing takes a chosen time: it reads a parameter, as any layer does, and then keeps the machine
/// busy, forward and backward. Its gradients are zeros.
struct TimedLayerImpl : torch::nn::Module {
  TimedLayerImpl(const nlohmann::json& about, size_t index, Machine& machine);
  at::Tensor forward(const at::Tensor& x);

 private:
  size_t index_;
  double forward_us_, backward_us_;
  std::vector<at::Tensor> weights_;
  Machine* machine_;
};
TORCH_MODULE(TimedLayer);

/// How a stack is sharded: bench/stack.py and bench/scale.py write it.
struct Sharding {
  explicit Sharding(const nlohmann::json& request);
  ReshardAfterForward reshard;  ///< of layers that say nothing themselves
  int prefetch_distance;
  std::optional<int64_t> byte_budget;
  bool separates_reductions;
  int reduce_buffers;
  bool is_flat;   ///< ranks share elements instead of rows
  bool is_mixed;  ///< kept and reduced in float32, gathered in bfloat16
};

struct LayerStackImpl : torch::nn::Module {
  /// Each layer is sharded before the next one is made, so that no two are whole at a time.
  LayerStackImpl(const nlohmann::json& layers, const Sharding& sharding, const DeviceMesh& mesh, Machine& machine);
  at::Tensor forward(at::Tensor x);
  FSDPModule root() const { return *find_fsdp_module(*this); }

 private:
  torch::nn::ModuleList layers_;
};
TORCH_MODULE(LayerStack);

}  // namespace fsdp::bench
