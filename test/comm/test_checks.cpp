// What every backend rejects before anything is sent.
#include "comm/checks.hpp"

#include <catch2/catch.hpp>

#include "comm/forwarding.hpp"
#include "comm/work.hpp"
#include "fsdp/error.hpp"
#include "fsdp/process_group.hpp"
#include "fsdp/simulated_network.hpp"

namespace fsdp::test {

using Catch::Contains;

TEST_CASE("sizes that do not fit are named with what was expected", "[comm][checks]") {
  const auto world = simulated_network({.world_size = 4, .rank = 1});
  CHECK_THROWS_WITH(
      world->start_all_gather(at::zeros({10}), at::zeros({3}), "blocks.3"),
      "all_gather of 'blocks.3' in group 'world' on rank 1 of 4: the output must have "
      "4 ranks x 3 elements = 12, found 10");
  CHECK_THROWS_WITH(
      world->start_reduce_scatter(at::zeros({3}), at::zeros({10}), ReduceOp::kSum, "blocks.3"),
      Contains("the input must have 4 ranks x 3 elements = 12, found 10"));
}

TEST_CASE("dtypes that differ are both named", "[comm][checks]") {
  const auto world = single_rank();
  CHECK_THROWS_WITH(world->start_all_gather(at::zeros({2}, at::kHalf), at::zeros({2}), "b"),
                    Contains("Half for the output and Float for the input"));
}

TEST_CASE("tensors that are not contiguous, or undefined, are rejected", "[comm][checks]") {
  const auto world = single_rank();
  CHECK_THROWS_WITH(world->start_all_reduce(at::zeros({2, 3}).t(), ReduceOp::kSum, "b"),
                    Contains("must be contiguous") && Contains("strides [1, 3]"));
  CHECK_THROWS_WITH(world->start_broadcast(at::Tensor(), 0, "b"), Contains("undefined tensor"));
}

TEST_CASE("tensors whose memory does not hold their values are rejected", "[comm][checks]") {
  const auto world = single_rank();
  const auto complex = at::ones({2}, at::kComplexFloat);
  CHECK_THROWS_WITH(world->start_all_reduce(complex.conj(), ReduceOp::kSum, "b"),
                    Contains("the tensor is a lazy view of another's memory (conj, neg)") && Contains("pass a plain tensor"));
  CHECK_THROWS_WITH(world->start_all_gather(at::zeros({2}, at::kComplexFloat), complex.conj(), "b"),
                    Contains("the input is a lazy view"));
  CHECK_THROWS_WITH(world->start_broadcast(at::_efficientzerotensor({2}, at::kFloat), 0, "b"),
                    Contains("a zero without memory"));
  CHECK_THROWS_WITH(world->start_all_reduce(at::eye(2).to_sparse(), ReduceOp::kSum, "b"),
                    Contains("a tensor of layout Sparse"));
}

TEST_CASE("a root outside the group is rejected", "[comm][checks]") {
  const auto world = simulated_network({.world_size = 2});
  CHECK_THROWS_WITH(world->start_broadcast(at::zeros({1}), 2, "b"),
                    Contains("a rank of the group, 0 to 1, found 2"));
}

TEST_CASE("a batch needs as many outputs as inputs", "[comm][checks]") {
  const auto world = simulated_network({.world_size = 1});
  const std::vector<at::Tensor> one = {at::zeros({1})};
  const std::vector<at::Tensor> two = {at::zeros({1}), at::zeros({1})};
  CHECK_THROWS_AS(world->start_all_gather_batch(two, one, "b"), UsageError);
  CHECK_THROWS_AS(world->start_reduce_scatter_batch({}, {}, ReduceOp::kSum, "b"), UsageError);
}

TEST_CASE("a tensor on another device than the group's is rejected by a real backend",
          "[comm][checks]") {
  run_ranks(1, [](const std::shared_ptr<Communicator>& world) {
    try {
      world->start_all_reduce(at::zeros({2}, at::kMeta), ReduceOp::kSum, "b");
    } catch (const UsageError& error) {
      if (std::string(error.what()).find("must be on cpu") != std::string::npos) return;
      throw;
    }
    throw std::logic_error("a meta tensor was accepted");
  });
}

namespace {

/// A group on CUDA devices, of two ranks that never meet.
struct OnCuda : ForwardingCommunicator {
  explicit OnCuda(c10::DeviceIndex index) : ForwardingCommunicator(simulated_network({.world_size = 2})), index(index) {}
  c10::DeviceType device_type() const override { return c10::DeviceType::CUDA; }
  c10::DeviceIndex device_index() const override { return index; }
  std::shared_ptr<Communicator> split(std::span<const int> ranks, const std::string& name) override {
    return inner().split(ranks, name);
  }
  c10::DeviceIndex index;
};

/// That says so of itself; nobody reads it.
at::Tensor on_cuda(c10::DeviceIndex index, int64_t numel) {
  static float memory[64];
  const c10::Device device(c10::DeviceType::CUDA, index);
  const auto options = at::TensorOptions(at::kFloat).device(device);
  return at::for_blob(memory, {numel}).options(options).target_device(device).make_tensor();
}

}  // namespace

TEST_CASE("a tensor on another device of the same type than the group's is rejected with both", "[comm][checks]") {
  const OnCuda group(1);
  checks::all_gather(group, on_cuda(1, 4), on_cuda(1, 2), "b");
  CHECK_THROWS_WITH(checks::all_gather(group, on_cuda(1, 4), on_cuda(0, 2), "b"),
                    Contains("the input must be on cuda:1") && Contains("found cuda:0"));
  CHECK_THROWS_WITH(checks::reduce_scatter(group, on_cuda(0, 2), on_cuda(0, 4), "b"),
                    Contains("the input must be on cuda:1") && Contains("found cuda:0"));
  CHECK_THROWS_WITH(checks::all_reduce(group, on_cuda(0, 4), "b"), Contains("must be on cuda:1"));
  CHECK_THROWS_WITH(checks::broadcast(group, on_cuda(0, 4), 0, "b"), Contains("must be on cuda:1"));
}

TEST_CASE("a group that takes any device of its type takes one for each collective", "[comm][checks]") {
  const OnCuda group(-1);
  checks::all_gather(group, on_cuda(0, 4), on_cuda(0, 2), "b");
  checks::all_reduce(group, on_cuda(1, 4), "b");
  CHECK_THROWS_WITH(checks::all_gather(group, on_cuda(0, 4), on_cuda(1, 2), "b"),
                    Contains("on one device, found cuda:0 and cuda:1"));
  const std::vector<at::Tensor> wholes = {on_cuda(0, 4), on_cuda(1, 4)}, pieces = {on_cuda(0, 2), on_cuda(1, 2)};
  CHECK_THROWS_WITH(checks::all_gather_batch(group, wholes, pieces, "b"), Contains("on one device, found cuda:0 and cuda:1"));
  CHECK_THROWS_WITH(checks::reduce_scatter_batch(group, pieces, wholes, "b"),
                    Contains("on one device, found cuda:0 and cuda:1"));
  CHECK_THROWS_WITH(checks::all_reduce(group, at::zeros({2}), "b"), Contains("must be on cuda,") && Contains("found cpu"));
}

TEST_CASE("bytes are written with separators", "[comm][checks]") {
  CHECK(with_separators(0) == "0");
  CHECK(with_separators(999) == "999");
  CHECK(with_separators(12345) == "12,345");
  CHECK(with_separators(1234567) == "1,234,567");
  CHECK(with_separators(-1234) == "-1,234");
}

}  // namespace fsdp::test
