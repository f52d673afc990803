#include <catch2/catch.hpp>

#include <ATen/record_function.h>
#include <torch/csrc/profiler/stubs/base.h>

#include <mutex>

#include "fsdp/statistics.hpp"
#include "support/models.hpp"
#include "trace/nvtx_ranges.hpp"

namespace fsdp::test {
namespace {

/// Writes down what NVTX would be told, of all threads.
struct SeenByNvtx : torch::profiler::impl::ProfilerStubs {
  void record(c10::DeviceIndex*, torch::profiler::impl::ProfilerVoidEventStub*, int64_t*) const override {}
  float elapsed(const torch::profiler::impl::ProfilerVoidEventStub*,
                const torch::profiler::impl::ProfilerVoidEventStub*) const override {
    return 0;
  }
  void mark(const char*) const override {}
  void rangePush(const char* name) const override {
    std::lock_guard lock(mutex);
    pushed.emplace_back(name);
  }
  void rangePop() const override {
    std::lock_guard lock(mutex);
    ++popped;
  }
  bool enabled() const override { return true; }
  void onEachDevice(std::function<void(int)>) const override {}
  void synchronize() const override {}

  mutable std::mutex mutex;
  mutable std::vector<std::string> pushed;
  mutable size_t popped = 0;
};

}  // namespace

TEST_CASE("NVTX is shown the ranges of a root and not the user's, and each that begins ends", "[group][nvtx_ranges]") {
  auto* const before = const_cast<torch::profiler::impl::ProfilerStubs*>(torch::profiler::impl::cudaStubs());
  SeenByNvtx seen;
  torch::profiler::impl::registerCUDAMethods(&seen);
  CHECK(NvtxRanges::exists());
  {
    const NvtxRanges ranges;
    CHECK(on_ranks(2, [](Rank& rank) {
      RECORD_USER_SCOPE("the user's own");
      ShardedChain chain(rank.mesh());
      chain.step(rank.index());
      rank.check(statistics(chain.root[0]).all_gathers > 0, "gathered");
    }));
  }
  torch::profiler::impl::registerCUDAMethods(before);
  const auto count = [&](const std::string& name) { return std::ranges::count(seen.pushed, name); };
  CHECK(count("FSDP::all_gather (layer1)") == 2 * 2);            // in forward and in backward, on two ranks
  CHECK(count("FSDP::post_backward_reduce (layer1)") == 1 * 2);
  CHECK(count("the user's own") == 0);
  CHECK(seen.popped == seen.pushed.size());
}

}  // namespace fsdp::test
