#pragma once

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>

#include <stdexcept>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

// A backend of c10d's that writes down what it is given, as the backend of torch would get it.

namespace fsdp::test {

/// One collective.
struct BackendCall {
  std::string collective;  ///< "reduce_scatter", "all_reduce", "all_gather", "broadcast"
  std::string operation;   ///< "sum", "average", "multiplied sum", "max" or "min"; of a gather empty
  at::ScalarType dtype;
  double factor = 1;     ///< of a multiplied sum
  size_t pieces = 1;     ///< tensors in one launch
  bool has_own_stream;   ///< not the caller's current one
  c10::Stream current;   ///< of the caller

  std::string text() const {
    return fmt::format("{}{} of {}{}", collective, operation.empty() ? "" : " " + operation, c10::toString(dtype),
                       pieces == 1 ? "" : fmt::format(" x {}", pieces));
  }
};

class DoneWork final : public c10d::Work {
 public:
  bool isCompleted() override { return true; }
  bool wait(std::chrono::milliseconds /*timeout*/) override { return true; }
};

/// Rank 0 of a group whose other ranks bring what it brings. As NCCL of one version does with a factor of a narrow dtype
/// (see Note [No factor goes through c10d]), it takes it for zero.
class RecordedBackend final : public c10d::Backend {
 public:
  using Log = std::shared_ptr<std::vector<BackendCall>>;
  RecordedBackend(std::string name, int size, Log log)
      : c10d::Backend(/*rank=*/0, size), name_(std::move(name)), log_(std::move(log)) {}

  const std::string getBackendName() const override { return name_; }

  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions& options) override {
    note("all_gather", nullptr, input, 1, options.asyncOp);
    return gather(output, input);
  }
  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(std::vector<at::Tensor>& outputs,
                                                                 std::vector<at::Tensor>& inputs,
                                                                 const c10d::AllgatherOptions& options) override {
    note("all_gather", nullptr, inputs[0], inputs.size(), options.asyncOp);
    for (size_t i = 0; i < inputs.size(); ++i) gather(outputs[i], inputs[i]);
    return c10::make_intrusive<DoneWork>();
  }
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                      const c10d::ReduceScatterOptions& options) override {
    note("reduce_scatter", &options.reduceOp, input, 1, options.asyncOp);
    output.copy_(input.narrow(0, 0, output.numel()) * factor());
    return c10::make_intrusive<DoneWork>();
  }
  c10::intrusive_ptr<c10d::Work> reduce_scatter_tensor_coalesced(std::vector<at::Tensor>& outputs,
                                                                 std::vector<at::Tensor>& inputs,
                                                                 const c10d::ReduceScatterOptions& options) override {
    note("reduce_scatter", &options.reduceOp, inputs[0], inputs.size(), options.asyncOp);
    for (size_t i = 0; i < inputs.size(); ++i)
      outputs[i].copy_(inputs[i].flatten().narrow(0, 0, outputs[i].numel()).view_as(outputs[i]) * factor());
    return c10::make_intrusive<DoneWork>();
  }
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override {
    note("all_reduce", &options.reduceOp, tensors[0], 1, options.asyncOp);
    tensors[0].mul_(factor());
    return c10::make_intrusive<DoneWork>();
  }
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& options) override {
    note("broadcast", nullptr, tensors[0], 1, options.asyncOp);
    return c10::make_intrusive<DoneWork>();
  }
  void abort() override {}
  void shutdown() override {}

 private:
  c10::intrusive_ptr<c10d::Work> gather(at::Tensor& output, const at::Tensor& input) {
    output.view({getSize(), -1}).copy_(input.reshape({1, -1}).expand({getSize(), -1}));
    return c10::make_intrusive<DoneWork>();
  }

  void note(const char* collective, const c10d::ReduceOp* op, const at::Tensor& tensor, size_t pieces, bool is_async) {
    BackendCall call{.collective = collective,
                      .operation = "",
                      .dtype = tensor.scalar_type(),
                      .pieces = pieces,
                      .has_own_stream = is_async,
                      .current = c10::impl::VirtualGuardImpl(tensor.device().type()).getStream(tensor.device())};
    if (op != nullptr) name_operation(call, *op);
    log_->push_back(std::move(call));
  }

  static void name_operation(BackendCall& call, const c10d::ReduceOp& op) {
    if (op == c10d::ReduceOp::SUM) call.operation = "sum";
    if (op == c10d::ReduceOp::AVG) call.operation = "average";
    if (op == c10d::ReduceOp::MAX) call.operation = "max";
    if (op == c10d::ReduceOp::MIN) call.operation = "min";
    if (op == c10d::ReduceOp::PREMUL_SUM) {
      call.operation = "multiplied sum";
      const bool is_narrow = call.dtype == at::kHalf || call.dtype == at::kBFloat16;
      call.factor = is_narrow ? 0 : static_cast<const c10d::NCCLPreMulSumSupplement&>(*op.supplement_).double_factor;
    }
    if (call.operation.empty()) throw std::logic_error("an operation that nobody asks for");
  }

  /// What all ranks' equal values come to.
  double factor() const {
    const auto& call = log_->back();
    const double ranks = getSize();
    return call.operation == "sum" ? ranks : call.operation == "multiplied sum" ? ranks * call.factor : 1;
  }

  std::string name_;
  Log log_;
};

}  // namespace fsdp::test
