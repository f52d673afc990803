#include <catch2/catch.hpp>

#include "support/models.hpp"

namespace fsdp::test {

using std::chrono::milliseconds;

TEST_CASE("the options of the check are checked", "[group][schedule_check]") {
  CHECK(on_ranks(2, [](Rank& rank) {
    ShardedChain chain(rank.mesh());
    rank.check_throws<StateError>([&] { set_schedule_check(chain.layers[0], {}); }, {"layer0", "not a root"}, "no root");
    rank.check_throws<UsageError>([&] { set_schedule_check(chain.root[0], {.late_after = milliseconds(0)}); },
                                  {"above 0 ms"}, "no time");
    set_schedule_check(chain.root[0], {.late_after = milliseconds(5000)});
    chain.step(rank.index());
    rank.check_throws<StateError>([&] { set_schedule_check(chain.root[0], {}); }, {"before the first step"}, "too late");
  }));
}

}  // namespace fsdp::test
