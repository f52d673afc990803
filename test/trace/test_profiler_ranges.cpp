#include <catch2/catch.hpp>

#include <ATen/record_function.h>

#include "support/models.hpp"

// What a profiler is shown.

namespace fsdp::test {
namespace {

/// The user's ranges on this thread while it lives, in the order they began.
class Profiler {
 public:
  Profiler() {
    ranges().clear();
    handle_ = at::addThreadLocalCallback(
        at::RecordFunctionCallback([](const at::RecordFunction& function) -> std::unique_ptr<at::ObserverContext> {
          ranges().emplace_back(function.name());
          return nullptr;
        }).scopes({at::RecordScope::USER_SCOPE}));
  }
  ~Profiler() { at::removeCallback(handle_); }
  static std::vector<std::string>& ranges() {
    thread_local std::vector<std::string> seen;
    return seen;
  }

 private:
  at::CallbackHandle handle_;
};

int64_t count(const std::string& name) {
  return std::count(Profiler::ranges().begin(), Profiler::ranges().end(), name);
}

}  // namespace

TEST_CASE("a profiler sees each gather, wait, copy, reshard and reduce with the module's name",
          "[group][profiler_ranges]") {
  CHECK(on_ranks(2, [](Rank& rank) {
    ShardedChain chain(rank.mesh());
    chain.step(rank.index());
    const auto before = statistics(chain.root[0]);
    Profiler profiler;
    chain.step(rank.index());
    const auto after = statistics(chain.root[0]);
    for (const std::string module : {"layer1", "layer2"}) {
      rank.check_equal(count(fmt::format("FSDP::all_gather ({})", module)), 2, module);
      rank.check_equal(count(fmt::format("FSDP::all_gather_wait ({})", module)), 2, module);
      rank.check_equal(count(fmt::format("FSDP::all_gather_copy_out ({})", module)), 2, module);
      rank.check_equal(count(fmt::format("FSDP::reshard ({})", module)), 2, module);
      rank.check_equal(count(fmt::format("FSDP::post_backward_reduce ({})", module)), 1, module);
      rank.check_equal(count(fmt::format("FSDP::reduce_scatter ({})", module)), 1, module);
      rank.check_equal(count(fmt::format("FSDP::reduce_scatter_wait ({})", module)), 1, module);
    }
    rank.check_equal(count("FSDP::all_gather (root)"), 1, "the root's, kept after forward");
    int64_t gathers = 0, reductions = 0;
    for (const auto& range : Profiler::ranges()) {
      gathers += range.starts_with("FSDP::all_gather (");
      reductions += range.starts_with("FSDP::post_backward_reduce (");
    }
    rank.check_equal(gathers, after.all_gathers - before.all_gathers, "all gathers");
    rank.check_equal(reductions, after.reductions - before.reductions, "all reductions");
  }));
}

TEST_CASE("with replicas the all-reduce is a range too", "[group][profiler_ranges]") {
  CHECK(on_ranks(4, [](Rank& rank) {
    ShardedChain chain(rank.hybrid(2, 2));
    Profiler profiler;
    chain.step(rank.index());
    rank.check_equal(count("FSDP::all_reduce (layer1)"), 1, "launched");
    rank.check_equal(count("FSDP::all_reduce_wait (layer1)"), 1, "waited for");
  }));
}

TEST_CASE("without a profiler there is no range", "[group][profiler_ranges]") {
  CHECK(on_ranks(2, [](Rank& rank) {
    ShardedChain chain(rank.mesh());
    { Profiler profiler; }
    chain.step(rank.index());
    rank.check(Profiler::ranges().empty(), "nobody listens");
  }));
}

TEST_CASE("a profiler sees the gather of another root's group that a list asks for", "[group][profiler_ranges]") {
  CHECK(on_ranks(2, [](Rank& rank) {
    auto model = seeded(5, [] { return Chain(2); });
    std::vector<FSDPModule> roots;
    for (auto& layer : model->layers) roots.push_back(fully_shard(layer, {.mesh = rank.mesh()}));
    roots[0].set_modules_to_forward_prefetch({roots[1]});
    Profiler profiler;
    model->layers[0]->forward(torch::ones({2, 6}));
    rank.check(!roots[1].is_unsharded(), "it has only begun");
    rank.check_equal(count("FSDP::all_gather (root)"), 2, "gathers");
  }));
}

TEST_CASE("what a list has gathered of another root is there when that root's step begins", "[group][profiler_ranges]") {
  CHECK(on_ranks(2, [](Rank& rank) {
    auto model = seeded(5, [] { return Chain(2); });
    std::vector<FSDPModule> roots;
    for (auto& layer : model->layers)
      roots.push_back(fully_shard(layer, {.mesh = rank.mesh(), .reshard_after_forward = false}));
    roots[0].set_modules_to_forward_prefetch({roots[1]});
    for (int step = 0; step < 3; ++step) {
      rank.log().clear();
      auto x = model->layers[0]->forward(torch::ones({2, 6}));
      model->layers[1]->forward(x).sum().backward();
      rank.check_equal(rank.subjects_of("all_gather").size(), size_t{2}, fmt::format("step {}", step));
      for (auto& root : roots) rank.check(!root.is_unsharded(), "released behind the step");
    }
  }));
}

}  // namespace fsdp::test
