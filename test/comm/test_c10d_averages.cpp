#include <ATen/ATen.h>

#include <catch2/catch.hpp>

#include "comm/c10d/c10d_communicator.hpp"
#include "comm/scaled_sum.hpp"
#include "fsdp/error.hpp"
#include "recorded_backend.hpp"

// Averages in the collective over c10d's NCCL backend, as Python's process groups have it: by what reaches the backend.

namespace fsdp::test {
namespace {

using Catch::Contains;

struct Recorded {
  explicit Recorded(const std::string& backend)
      : group(c10d_communicator({.backend = c10::make_intrusive<RecordedBackend>(backend, /*size=*/2, log),
                                 .world_ranks = {0, 1},
                                 .launches_batches = true})) {}
  std::vector<std::string> texts() const {
    std::vector<std::string> all;
    for (const auto& call : *log) all.push_back(call.text());
    return all;
  }

  RecordedBackend::Log log = std::make_shared<std::vector<BackendCall>>();
  std::shared_ptr<Communicator> group;
};

}  // namespace

TEST_CASE("c10d's NCCL averages in the collective, one launch for all", "[comm][averages]") {
  const auto dtype = GENERATE(at::kFloat, at::kDouble, at::kBFloat16, at::kHalf);
  const Recorded nccl("nccl");
  auto* scaled = scaled_sums_of(*nccl.group, {.dtype = dtype, .scale = 0.5});
  REQUIRE(scaled != nullptr);

  const std::vector<at::Tensor> inputs = {at::arange(4, dtype), at::arange(6, dtype)};
  const std::vector<at::Tensor> outputs = {at::zeros({2}, dtype), at::zeros({3}, dtype)};
  scaled->start_scaled_reduce_scatter(outputs, inputs, 0.5, "blocks.0")->wait();
  for (size_t i = 0; i < 2; ++i) CHECK(outputs[i].equal(inputs[i].narrow(0, 0, outputs[i].numel())));
  scaled->start_scaled_reduce_scatter({&outputs[0], 1}, {&inputs[0], 1}, 0.5, "blocks.0")->wait();
  auto tensor = at::arange(3, dtype);
  scaled->start_scaled_all_reduce(tensor, 0.5, "blocks.0")->wait();
  CHECK(tensor.equal(at::arange(3, dtype)));
  nccl.group->start_all_reduce(tensor, ReduceOp::kSum, "blocks.0")->wait();
  CHECK(tensor.equal(at::arange(3, dtype) * 2));
  const std::string name = c10::toString(dtype);
  CHECK(nccl.texts() ==
        std::vector<std::string>{"reduce_scatter average of " + name + " x 2", "reduce_scatter average of " + name,
                                 "all_reduce average of " + name, "all_reduce sum of " + name});
  for (const auto& call : *nccl.log) {
    CHECK(call.has_own_stream);
    CHECK(call.factor == 1);
  }
}

TEST_CASE("what is no average is the caller's to divide, which is said before anything is sent", "[comm][averages]") {
  const Recorded nccl("nccl");
  CHECK(scaled_sums_of(*nccl.group, {.dtype = at::kInt, .scale = 0.5}) == nullptr);
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf})
    CHECK(scaled_sums_of(*nccl.group, {.dtype = dtype, .scale = 0.25}) == nullptr);
  const Recorded gloo("gloo");
  CHECK(scaled_sums_of(*gloo.group, {.dtype = at::kFloat, .scale = 0.5}) == nullptr);
  auto& scaled = dynamic_cast<HasScaledSums&>(*gloo.group);
  CHECK_THROWS_AS(scaled.start_scaled_all_reduce(at::ones({2}), 0.5, "blocks.0"), UsageError);
  CHECK_THROWS_WITH(scaled.start_scaled_all_reduce(at::ones({2}), 0.5, "blocks.0"),
                    Contains("blocks.0") && Contains("gloo") && Contains("scaled_sums_of"));
  CHECK_THROWS_WITH(dynamic_cast<HasScaledSums&>(*nccl.group).start_scaled_all_reduce(at::ones({2}), 0.25, "blocks.0"),
                    Contains("cannot be scaled by 0.25"));
  CHECK(gloo.log->empty());
  CHECK(nccl.log->empty());
}

}  // namespace fsdp::test
