// A group over c10d, and the connections that its backend holds.
#include <catch2/catch.hpp>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "comm/c10d/c10d_communicator.hpp"
#include "comm/peer_connections.hpp"
#include "fsdp/error.hpp"

namespace fsdp::test {
namespace {

struct Counts {
  int disconnects = 0, destroyed = 0;
};

class GatheredWork final : public c10d::Work {
 public:
  bool wait(std::chrono::milliseconds /*timeout*/) override { return true; }
  bool isCompleted() override { return true; }
};

/// A group of two that has all-gathers. What else it is asked for fails at once.
class ConnectedBackend final : public c10d::Backend, public HasPeerConnections {
 public:
  explicit ConnectedBackend(Counts& counts) : Backend(/*rank=*/0, /*size=*/2), counts_(counts) {}
  ~ConnectedBackend() override { ++counts_.destroyed; }
  const std::string getBackendName() const override { return "connected"; }
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& /*output*/, at::Tensor& /*input*/,
                                                 const c10d::AllgatherOptions& /*options*/) override {
    return c10::make_intrusive<GatheredWork>();
  }
  void abort() override {}
  void disconnect() noexcept override { ++counts_.disconnects; }
  void fail_stuck_waits() noexcept override {}

 private:
  Counts& counts_;
};

std::shared_ptr<Communicator> connected_group(Counts& counts, bool is_borrowed) {
  return c10d_communicator(
      {.backend = c10::make_intrusive<ConnectedBackend>(counts), .world_ranks = {0, 1}, .is_borrowed = is_borrowed});
}

}  // namespace

TEST_CASE("a collective that cannot start ends the group's connections, unless others use them", "[comm][c10d_failure]") {
  for (const bool is_borrowed : {false, true}) {
    Counts counts;
    const auto group = connected_group(counts, is_borrowed);
    for (int i = 0; i < 2; ++i)
      CHECK_THROWS_AS(group->start_all_reduce(at::ones({1}), ReduceOp::kSum, "loss"), CommError);
    CHECK(counts.disconnects == (is_borrowed ? 0 : 1));
  }
}

TEST_CASE("an abort ends the connections", "[comm][c10d_failure]") {
  Counts counts;
  connected_group(counts, /*is_borrowed=*/false)->abort("enough");
  CHECK(counts.disconnects >= 1);
}

TEST_CASE("a group that nothing happened to goes with its backend, whoever keeps its works", "[comm][c10d_failure]") {
  Counts counts;
  auto group = connected_group(counts, /*is_borrowed=*/false);
  const auto work = group->start_all_gather(at::zeros({2}), at::ones({1}), "weight");
  group = nullptr;
  CHECK(counts.destroyed == 1);
  CHECK(counts.disconnects == 0);
  work->wait();
}

}  // namespace fsdp::test
