#include <catch2/catch.hpp>

#include <future>
#include <string>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "comm/nccl/nccl_rendezvous.hpp"
#include "fsdp/error.hpp"
#include "nccl_substitute.hpp"

namespace fsdp::test {
namespace {

struct MeetingPlace {
  NcclSubstitute nccl = {};
  c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
  std::shared_ptr<NoticeBoard> notices = thread_notice_board(std::chrono::milliseconds(1000));

  NcclGroupConfig rank(int rank) const {
    return {.name = "world", .rank = rank, .size = 3, .key = "world", .store = store, .notices = notices,
            .api = &nccl.api(), .streams = nullptr};
  }
};

[[noreturn]] void no_patience() { throw CommError("no patience"); }

}  // namespace

TEST_CASE("ranks connect by what the first of them has made, a channel by its own", "[comm][nccl_rendezvous]") {
  const MeetingPlace place;
  const auto ids = [&](const std::string& channel) {
    std::vector<std::future<ncclUniqueId>> all;
    for (const int rank : {2, 1, 0})
      all.push_back(std::async(std::launch::async, [&, rank] { return exchange_id(place.rank(rank), channel, [] {}); }));
    std::vector<std::string> found;
    for (auto& one : all) found.emplace_back(one.get().internal, sizeof(ncclUniqueId));
    return found;
  };
  const auto gathers = ids("gathers"), reductions = ids("reductions");
  for (const auto& all : {gathers, reductions}) CHECK(all == std::vector<std::string>(3, all[0]));
  CHECK(gathers[0] != reductions[0]);
}

TEST_CASE("no rank goes on to NCCL before all have come", "[comm][nccl_rendezvous]") {
  const MeetingPlace place;
  for (const int rank : {0, 1})
    CHECK_THROWS_WITH(exchange_id(place.rank(rank), "gathers", no_patience), "no patience");
  CHECK(missing_ranks(place.rank(0), "gathers") == "2");
}

TEST_CASE("ranks that have not come are named", "[comm][nccl_rendezvous]") {
  const MeetingPlace place;
  CHECK(missing_ranks(place.rank(1), "gathers") == "0, 1, 2");
  CHECK_THROWS_WITH(exchange_id(place.rank(1), "gathers", no_patience), "no patience");
  CHECK(missing_ranks(place.rank(1), "gathers") == "0, 2");
  CHECK(missing_ranks(place.rank(1), "reductions") == "0, 1, 2");
}

TEST_CASE("the first rank that leaves says why, for each group apart", "[comm][nccl_rendezvous]") {
  const MeetingPlace place;
  CHECK(why_others_left(place.rank(0)).empty());
  tell_why_left(place.rank(2), "a timeout");
  tell_why_left(place.rank(1), "an error");
  CHECK(why_others_left(place.rank(0)) == "rank 2: a timeout");
  auto other = place.rank(0);
  other.key = "world/split_0";
  CHECK(why_others_left(other).empty());
}

}  // namespace fsdp::test
