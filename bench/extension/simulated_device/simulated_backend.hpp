#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "extension/simulated_device/simulated_streams.hpp"

namespace fsdp::bench {

/// What a collective takes: launch + passes * (ring + bytes * us_per_byte), as fsdp::SimulatedNetwork has it. An all-gather has
/// one pass.
struct SimulatedRing {
  double launch_us = 0, ring_us = 0;
  double us_per_byte = 0;  ///< of the full buffer
  double reduce_passes = 1, all_reduce_passes = 2;
};

/// A c10d backend for one rank of a world of any size, whose collectives are time on the simulated device's link. Each
/// backend has a queue of its own there. Like ProcessGroupNCCL it runs what is asked to be synchronous on the current
/// stream, and the rest on a stream of its own, which `Work::wait` lets the current stream wait for. Nothing is moved but
/// what set-up looks at.
class SimulatedBackend : public c10d::Backend {
 public:
  SimulatedBackend(int rank, int size, const SimulatedRing& ring);

  // torch's fake process group waits in streams too, and is known for it by this name.
  const std::string getBackendName() const override { return "fake"; }

  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                                           const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                      const c10d::ReduceScatterOptions& options) override;
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& options) override;

 private:
  c10::intrusive_ptr<c10d::Work> start(const char* name, const std::vector<at::Tensor>& full, double passes,
                                       bool is_async);

  SimulatedRing ring_;
  size_t queue_, stream_;
};

}  // namespace fsdp::bench
