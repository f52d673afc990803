#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace fsdp::bench {

/// A c10d backend for one rank of a world of any size whose collectives move nothing and are done
/// when they return. Results are whatever the buffers held.
///
/// torch's own fake process group copies the input once per rank inside an all-gather, which at
/// 1024 ranks would count as FSDP2's work.
class NoMoveBackend : public c10d::Backend {
 public:
  NoMoveBackend(int rank, int size) : Backend(rank, size) {}

  const std::string getBackendName() const override { return "no_move"; }

  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                           std::vector<at::Tensor>& inputs,
                                           const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override;
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& options) override;
};

}  // namespace fsdp::bench
