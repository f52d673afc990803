#include <ATen/ATen.h>

#include <catch2/catch.hpp>

#include "comm/c10d/c10d_communicator.hpp"
#include "comm/scaled_sum.hpp"
#include "fsdp/error.hpp"

// Averages in the collective over c10d's NCCL backend, as Python's process groups have it: by what reaches the backend.

namespace fsdp::test {
namespace {

using Catch::Contains;

class DoneWork final : public c10d::Work {
 public:
  bool isCompleted() override { return true; }
  bool wait(std::chrono::milliseconds /*timeout*/) override { return true; }
};

/// One of two ranks, of which the other brings zeros; called what a test says.
struct SummingBackend : c10d::Backend {
  explicit SummingBackend(std::string name) : c10d::Backend(/*rank=*/0, /*size=*/2), name(std::move(name)) {}
  const std::string getBackendName() const override { return name; }

  c10::intrusive_ptr<c10d::Work> done(const char* call, const c10d::ReduceOp& op) {
    calls.emplace_back(call);
    factor = 1;
    if (op == c10d::ReduceOp::PREMUL_SUM)
      factor = static_cast<const c10d::NCCLPreMulSumSupplement&>(*op.supplement_).double_factor;
    else if (!(op == c10d::ReduceOp::SUM))
      throw std::logic_error("another operation");
    return c10::make_intrusive<DoneWork>();
  }
  void sum(at::Tensor& output, const at::Tensor& input) {
    output.copy_(input.narrow(0, 0, output.numel()) * factor);
  }
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                      const c10d::ReduceScatterOptions& options) override {
    auto work = done("one", options.reduceOp);
    sum(output, input);
    return work;
  }
  c10::intrusive_ptr<c10d::Work> reduce_scatter_tensor_coalesced(std::vector<at::Tensor>& outputs,
                                                                 std::vector<at::Tensor>& inputs,
                                                                 const c10d::ReduceScatterOptions& options) override {
    auto work = done("batch", options.reduceOp);
    for (size_t i = 0; i < outputs.size(); ++i) sum(outputs[i], inputs[i]);
    return work;
  }
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override {
    auto work = done("all", options.reduceOp);
    tensors[0].mul_(factor);
    return work;
  }

  std::string name;
  std::vector<std::string> calls;
  double factor = 0;
};

std::shared_ptr<Communicator> over(const c10::intrusive_ptr<SummingBackend>& backend) {
  return c10d_communicator({.backend = backend, .world_ranks = {0, 1}, .launches_batches = true});
}

TEST_CASE("c10d's NCCL multiplies in the collective, one launch for all", "[comm][averages]") {
  const auto backend = c10::make_intrusive<SummingBackend>("nccl");
  const auto group = over(backend);
  auto* scaled = scaled_sums_of(*group, at::kFloat);
  REQUIRE(scaled != nullptr);
  const auto dtype = GENERATE(at::kFloat, at::kDouble, at::kBFloat16, at::kHalf);
  CHECK(scaled_sums_of(*group, dtype) == scaled);

  const std::vector<at::Tensor> inputs = {at::arange(4, dtype), at::arange(6, dtype)};
  const std::vector<at::Tensor> outputs = {at::zeros({2}, dtype), at::zeros({3}, dtype)};
  scaled->start_scaled_reduce_scatter(outputs, inputs, 0.5, "blocks.0")->wait();
  for (size_t i = 0; i < 2; ++i) CHECK(outputs[i].equal(inputs[i].narrow(0, 0, outputs[i].numel()) * 0.5));
  scaled->start_scaled_reduce_scatter({&outputs[0], 1}, {&inputs[0], 1}, 0.25, "blocks.0")->wait();
  CHECK(outputs[0].equal(inputs[0].narrow(0, 0, 2) * 0.25));
  auto tensor = at::arange(3, dtype);
  scaled->start_scaled_all_reduce(tensor, 0.5, "blocks.0")->wait();
  CHECK(tensor.equal(at::arange(3, dtype) * 0.5));
  group->start_all_reduce(tensor, ReduceOp::kSum, "blocks.0")->wait();
  CHECK(backend->calls == std::vector<std::string>{"batch", "one", "all", "all"});
  CHECK(backend->factor == 1);
}

TEST_CASE("what cannot be multiplied is said before anything is sent", "[comm][averages]") {
  const auto nccl = c10::make_intrusive<SummingBackend>("nccl");
  CHECK(scaled_sums_of(*over(nccl), at::kInt) == nullptr);
  const auto gloo = c10::make_intrusive<SummingBackend>("gloo");
  const auto group = over(gloo);
  CHECK(scaled_sums_of(*group, at::kFloat) == nullptr);
  auto& scaled = dynamic_cast<HasScaledSums&>(*group);
  CHECK_THROWS_AS(scaled.start_scaled_all_reduce(at::ones({2}), 0.5, "blocks.0"), UsageError);
  CHECK_THROWS_WITH(scaled.start_scaled_all_reduce(at::ones({2}), 0.5, "blocks.0"),
                    Contains("blocks.0") && Contains("gloo") && Contains("scaled_sums_of"));
  CHECK(gloo->calls.empty());
}

}  // namespace
}  // namespace fsdp::test
