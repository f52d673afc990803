#include <catch2/catch.hpp>

#include "module/state/module_table.hpp"
#include "support/models.hpp"

namespace fsdp::test {

constexpr int kModules = 2000;

TEST_CASE(
    "to shard n modules takes a number of looks at those known already that grows with n, not with "
    "its square",
    "[group][module_table]") {
  CHECK(on_ranks(1, [](Rank& rank) {
    std::vector<torch::nn::Linear> modules;
    const auto before = looks_at_known_modules();
    for (int i = 0; i < kModules; ++i) {
      modules.emplace_back(1, 1);
      fully_shard(modules.back(), {.mesh = rank.mesh()});
    }
    const auto looks = looks_at_known_modules() - before;
    rank.check(looks < 10 * kModules,
               fmt::format("{} modules were sharded with {} looks", kModules, looks));
  }));
}

TEST_CASE(
    "modules that are gone leave nothing behind in the table but as many entries as there are of "
    "others",
    "[group][module_table]") {
  CHECK(on_ranks(1, [](Rank& rank) {
    std::weak_ptr<RootContext> context;
    std::vector<torch::nn::Linear> others;
    {
      // Nothing to shard: the table owns its state.
      auto empty = torch::nn::Identity();
      fully_shard(empty, {.mesh = rank.mesh()});
      context = find_state(*empty)->context();
    }
    for (int i = 0; i < 20000 && !context.expired(); ++i) {
      others.emplace_back(1, 1);
      fully_shard(others.back(), {.mesh = rank.mesh()});
    }
    rank.check(context.expired(), "the state of a module that is gone goes");
  }));
}

}  // namespace fsdp::test
