#include <catch2/catch.hpp>

#include "comm/debug/fake_collectives.hpp"
#include "fsdp/process_group.hpp"
#include "fsdp/simulated_network.hpp"
#include "fsdp/testing/recording.hpp"
#include "rank_results.hpp"
#include "support/scoped_environment.hpp"

namespace fsdp::test {
namespace {

/// What is left of one all-gather, reduce-scatter, all-reduce and broadcast.
std::vector<std::string> calls_that_remain() {
  const auto log = std::make_shared<CallLog>();
  const auto group = with_fake_collectives(recording(simulated_network({.world_size = 2}), log));
  const at::Tensor whole = at::zeros({4}), piece = at::ones({2});
  all_gather(*group, whole, piece);
  CHECK(at::equal(whole, at::tensor({1.F, 1.F, 0.F, 0.F})));  // its own bytes are there in any case
  reduce_scatter(*group, piece, whole);
  all_reduce(*group, piece);
  broadcast(*group, piece, 0);
  return log->names();
}

}  // namespace

TEST_CASE("nothing is left out unless it is asked for", "[comm][left_out]") {
  CHECK(calls_that_remain().size() == 4);
  const auto group = simulated_network({.world_size = 2});
  CHECK(with_fake_collectives(group) == group);
}

TEST_CASE("FSDP_FAKE_ALL_GATHER leaves out the all-gathers alone", "[comm][left_out]") {
  const ScopedEnvironment set(Variables{{"FSDP_FAKE_ALL_GATHER", "1"}});
  CHECK(calls_that_remain() == std::vector<std::string>{"reduce_scatter subject", "all_reduce subject",
                                                        "broadcast subject"});
}

TEST_CASE("FSDP_FAKE_REDUCE leaves out what reduces", "[comm][left_out]") {
  const ScopedEnvironment set(Variables{{"FSDP_FAKE_REDUCE", "1"}});
  CHECK(calls_that_remain() == std::vector<std::string>{"all_gather subject", "broadcast subject"});
}

TEST_CASE("a group that was split from one goes on leaving out", "[comm][left_out]") {
  const ScopedEnvironment set(Variables{{"FSDP_FAKE_REDUCE", "1"}});
  const auto log = std::make_shared<CallLog>();
  const auto group = with_fake_collectives(recording(simulated_network({.world_size = 4}), log));
  const auto half = group->split(std::vector<int>{0, 1}, "half");
  all_reduce(*half, at::ones({2}));
  CHECK(log->calls.empty());
}

}  // namespace fsdp::test
