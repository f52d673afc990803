// Memory that NCCL knows: slots that all ranks register as windows; who may use them when, and who frees them.
#include <ATen/ATen.h>

#include <fmt/format.h>

#include <catch2/catch.hpp>

#include <algorithm>
#include <cstring>
#include <future>
#include <thread>

#include "comm/comm_memory.hpp"
#include "fsdp/error.hpp"
#include "nccl_ranks.hpp"
#include "support/logged_lines.hpp"

namespace fsdp::test {
namespace {

using namespace std::chrono_literals;
using Catch::Contains;

constexpr int64_t kBlock = 2 << 20;  // what a slot's bytes are rounded up to

/// Ranks' notes, by rank.
using Notes = std::vector<std::string>;

at::Tensor piece_of(const Communicator& comm, int value, int64_t bytes = 8) {
  return at::full({bytes}, 10 * value + comm.rank(), at::kByte);
}

/// What all ranks' pieces are together.
at::Tensor whole_of(int world_size, int value, int64_t bytes = 8) {
  std::vector<at::Tensor> pieces;
  for (int rank = 0; rank < world_size; ++rank) pieces.push_back(at::full({bytes}, 10 * value + rank, at::kByte));
  return at::cat(pieces);
}

at::Tensor gather_into(SymmMemBuffer& slot, Communicator& comm, const at::Tensor& piece) {
  auto whole = slot.take(comm.size() * piece.numel());
  comm.start_all_gather(whole, piece, "slot")->wait();
  return whole;
}

/// Where the host waits, too: the piece is not kept.
at::Tensor gather_into(SymmMemBuffer& slot, Communicator& comm, int value) {
  return gather_into(slot, comm, piece_of(comm, value));
}

/// Of those that are tested the one, or the oldest, that has slots.
int version_with_slots() { return std::max(nccl_test_version(), 22907); }

/// Throws what a test of a rank is to find.
void expect(bool condition, const std::string& what) {
  if (!condition) throw UsageError("not so: " + what);
}

}  // namespace

TEST_CASE("what is gathered into a slot is what is gathered anywhere, and lies in a window", "[comm][nccl_memory]") {
  for (const int world_size : {1, 2, 3}) {
    const NcclSubstitute nccl({.polls = 2, .version = version_with_slots()});
    const auto errors = errors_on_nccl(
        nccl, {.world_size = world_size, .streams = {.max_delay = 200us}}, [&](NcclRank& rank) {
          const auto first = make_slot(*rank.world, SlotUse::kGathers, world_size * 8);
          const auto second = make_slot(*rank.world, SlotUse::kGathers, 3 * kBlock + 1);
          expect(first->bytes() == world_size * 8 && second->bytes() == 3 * kBlock + 1, "as many bytes as asked for");
          for (int value : {1, 2, 3}) {
            for (const auto& slot : {first, second})
              expect(gather_into(*slot, *rank.world, value).equal(whole_of(world_size, value)), "gathered");
            const auto plain = at::zeros({world_size * 8}, at::kByte);
            all_gather(*rank.world, plain, piece_of(*rank.world, value));
            expect(plain.equal(whole_of(world_size, value)), "gathered elsewhere");
          }
          all_reduce(*rank.world, at::ones({1}));
          // 2 MiB and, for 6 MiB and a byte, 8 MiB.
          expect(nccl.counts().bytes == world_size * (1 + 4) * kBlock, "so much memory");
          all_reduce(*rank.world, at::ones({1}));
        });
    CHECK(errors == no_errors(world_size));
    CHECK(nccl.counts().windows == 2 * world_size);
    CHECK(nccl.counts().windowed_gathers == 2 * 3 * world_size);
    CHECK(nccl.counts().bytes == 0);
    CHECK(nccl.misuses().empty());
  }
}

TEST_CASE("a slot is filled again behind the stream that let go of it", "[comm][nccl_memory]") {
  const NcclSubstitute nccl({.version = version_with_slots()});
  const auto errors = errors_on_nccl(nccl, {}, [](NcclRank& rank) {
    const auto slot = make_slot(*rank.world, SlotUse::kGathers, 16);
    const StreamHandle compute = rank.streams->make_stream(StreamPriority::kNormal);
    const StreamHandle other = rank.streams->make_stream(StreamPriority::kNormal);
    const auto first = piece_of(*rank.world, 1), second = piece_of(*rank.world, 2), seen = at::zeros({16}, at::kByte);
    std::promise<void> opened;
    {
      const HostStreams::Current current(compute);
      auto whole = gather_into(*slot, *rank.world, first);
      HostStreams::enqueue(compute, [opened = opened.get_future().share()] { opened.wait(); });
      HostStreams::enqueue(compute,
                           [to = seen.data_ptr(), from = whole.const_data_ptr()] { std::memcpy(to, from, 16); });
    }
    at::Tensor next;
    {
      const HostStreams::Current current(other);
      next = gather_into(*slot, *rank.world, second);
    }
    std::this_thread::sleep_for(20ms);  // time for the second gather to run, were it not to wait
    opened.set_value();
    rank.streams->synchronize(compute);
    rank.streams->synchronize(other);
    expect(seen.equal(whole_of(2, 1)), "the first gather's values were there until they were read");
    expect(next.equal(whole_of(2, 2)), "the second's came then");
  });
  CHECK(errors == no_errors(2));
  CHECK(nccl.misuses().empty());
}

TEST_CASE("a slot is not filled again while a tensor refers to it, or a view of one", "[comm][nccl_memory]") {
  const NcclSubstitute nccl({.version = version_with_slots()});
  const auto errors = errors_on_nccl(nccl, {}, [](NcclRank& rank) {
    const auto slot = make_slot(*rank.world, SlotUse::kGathers, 16);
    auto view = gather_into(*slot, *rank.world, 1).narrow(0, 4, 2).view(at::kShort);
    expect(slot->is_taken(), "taken");
    try {
      (void)slot->take(16);
      expect(false, "an error");
    } catch (const StateError& error) {
      expect(std::string(error.what()).find("still refers") != std::string::npos, error.what());
    }
    view.reset();
    expect(!slot->is_taken(), "free again");
    expect(gather_into(*slot, *rank.world, 2).equal(whole_of(2, 2)), "gathered");
    try {
      (void)slot->take(17);
      expect(false, "an error");
    } catch (const UsageError& error) {
      expect(std::string(error.what()).find("16 bytes") != std::string::npos, error.what());
    }
  });
  CHECK(errors == no_errors(2));
  CHECK(nccl.misuses().empty());
}

TEST_CASE("ranks that ask for slots of different sizes are told so", "[comm][nccl_memory]") {
  const NcclSubstitute nccl({.version = version_with_slots()});
  const auto errors = errors_on_nccl(nccl, {.timeout = on_this_machine(300ms)}, [](NcclRank& rank) {
    make_slot(*rank.world, SlotUse::kGathers, rank.world->rank() == 0 ? 100 : 200);
  });
  CHECK_THAT(errors[0] + errors[1], Contains("not all of the 2 ranks allocated symmetric memory (slot_0_of_"));
  for (const std::string& error : errors) CHECK_THAT(error, Contains("memory for gathers in group 'world'"));
  CHECK(nccl.counts().windows == 0);
  CHECK(nccl.misuses().empty());
}

TEST_CASE("ranks that ask for slots of different uses are told so", "[comm][nccl_memory]") {
  const NcclSubstitute nccl({.version = version_with_slots()});
  const auto errors = errors_on_nccl(nccl, {.timeout = on_this_machine(300ms)}, [](NcclRank& rank) {
    // Both are connected.
    all_gather(*rank.world, at::zeros({16}, at::kByte), piece_of(*rank.world, 1));
    all_reduce(*rank.world, at::ones({1}));
    make_slot(*rank.world, rank.world->rank() == 0 ? SlotUse::kGathers : SlotUse::kReductions, 100);
  });
  CHECK_THAT(errors[0] + errors[1], Contains("not all of the 2 ranks allocated symmetric memory (slot_0_of_100_bytes_for_"));
  CHECK(nccl.counts().windows == 0);
  CHECK(nccl.misuses().empty());
}

TEST_CASE("memory or windows that one rank lacks leave all with plain memory, for good", "[comm][nccl_memory]") {
  using Options = NcclSubstitute::Options;
  for (const auto& options : {Options{.version = version_with_slots(), .mem_alloc_fails_at = 3},
                              Options{.version = version_with_slots(), .has_windows = false}}) {
    const NcclSubstitute nccl(options);
    const auto errors = errors_on_nccl(nccl, {.world_size = 3}, [](NcclRank& rank) {
      expect(why_no_slots(*rank.world).empty(), "not known before");
      expect(make_slot(*rank.world, SlotUse::kGathers, 100) == nullptr, "no slot");
      expect(make_slot(*rank.world, SlotUse::kGathers, 100) == nullptr, "nor later");
      const auto whole = at::zeros({24}, at::kByte);
      all_gather(*rank.world, whole, piece_of(*rank.world, 4));
      expect(whole.equal(whole_of(3, 4)), "gathered");
    });
    CHECK(errors == no_errors(3));
    CHECK(nccl.counts().windows == 0);
    CHECK(nccl.counts().bytes == 0);
    CHECK(nccl.misuses().empty());
  }
}

TEST_CASE("an NCCL without windows says so before anything is made", "[comm][nccl_memory]") {
  const NcclSubstitute nccl({.missing_symbol = "ncclCommWindowRegister"});
  Notes reasons(2);
  const auto errors = errors_on_nccl(nccl, {}, [&](NcclRank& rank) {
    reasons[rank.world->rank()] = why_no_slots(*rank.world);
    expect(make_slot(*rank.world, SlotUse::kGathers, 100) == nullptr, "no slot");
  });
  CHECK(errors == no_errors(2));
  for (const std::string& reason : reasons) CHECK_THAT(reason, Contains("begins with NCCL 2.27"));
  CHECK(nccl.counts().communicators == 0);
  CHECK(nccl.misuses().empty());
}

TEST_CASE("a slot that goes gives back its window, after the collectives that use it, and its memory",
          "[comm][nccl_memory]") {
  const NcclSubstitute nccl({.version = version_with_slots()});
  const auto errors = errors_on_nccl(nccl, {.streams = {.max_delay = 500us}}, [&](NcclRank& rank) {
    for (int round = 0; round < 5; ++round) {
      auto input = make_slot(*rank.world, SlotUse::kReductions, 32);
      auto gradients = input->take(32).view(at::kFloat).zero_();
      auto reduction = rank.world->start_reduce_scatter(at::zeros({4}), gradients, ReduceOp::kSum, "not waited for");
      gradients.reset();
      reduction.reset();
      input.reset();
      auto slot = make_slot(*rank.world, SlotUse::kGathers, 16);
      auto whole = slot->take(16);
      auto work = rank.world->start_all_gather(whole, piece_of(*rank.world, 1), "not waited for");
      whole.reset();
      work.reset();
      slot.reset();  // the substitute notes windows that are given back while they are in use
    }
    // What nobody has waited for is let go of by the watchdog.
    const auto end = std::chrono::steady_clock::now() + patience();
    while (nccl.counts().bytes > 0 && std::chrono::steady_clock::now() < end) std::this_thread::sleep_for(5ms);
    expect(nccl.counts().bytes == 0, "all of it is freed while the communicator lives");
    all_reduce(*rank.world, at::ones({1}));
  });
  CHECK(errors == no_errors(2));
  CHECK(nccl.counts().windows == 2 * 2 * 5);
  CHECK(nccl.misuses().empty());
}

TEST_CASE("what is reduced from a slot for reductions lies in a window of theirs", "[comm][nccl_memory]") {
  for (const int world_size : {1, 2, 3}) {
    const NcclSubstitute nccl({.polls = 2, .version = version_with_slots()});
    const auto errors = errors_on_nccl(
        nccl, {.world_size = world_size, .streams = {.max_delay = 200us}}, [&](NcclRank& rank) {
          const auto reduced_from = [&](SymmMemBuffer& slot, float value) {
            auto input = slot.take(world_size * 16).view(at::kFloat);
            input.fill_(value + static_cast<float>(rank.world->rank()));
            auto output = at::zeros({4});
            rank.world->start_reduce_scatter(output, input, ReduceOp::kSum, "slot")->wait();
            return output;
          };
          const auto first = make_slot(*rank.world, SlotUse::kReductions, world_size * 16);
          const auto second = make_slot(*rank.world, SlotUse::kReductions, world_size * 16);
          const auto other = make_slot(*rank.world, SlotUse::kGathers, world_size * 16);
          const float ranks = static_cast<float>(world_size) * static_cast<float>(world_size - 1) / 2;
          for (const float value : {1.F, 2.F, 3.F})
            for (const auto& slot : {first, second, other}) {
              const auto sum = at::full({4}, static_cast<float>(world_size) * value + ranks);
              expect(reduced_from(*slot, value).equal(sum), "reduced");
            }
        });
    CHECK(errors == no_errors(world_size));
    CHECK(nccl.counts().windows == 3 * world_size);
    // One that is for gathers is no window to reductions.
    CHECK(nccl.counts().windowed_reductions == 2 * 3 * world_size);
    CHECK(nccl.counts().bytes == 0);
    CHECK(nccl.misuses().empty());
  }
}

TEST_CASE("a tensor keeps its memory when slot and communicator are gone", "[comm][nccl_memory]") {
  const NcclSubstitute nccl({.version = version_with_slots()});
  std::vector<at::Tensor> kept(2);
  const auto errors = errors_on_nccl(nccl, {}, [&](NcclRank& rank) {
    const auto slot = make_slot(*rank.world, SlotUse::kGathers, 16);
    kept[rank.world->rank()] = gather_into(*slot, *rank.world, 5);
  });
  CHECK(errors == no_errors(2));
  CHECK(nccl.counts().bytes == 2 * kBlock);
  for (const auto& tensor : kept) CHECK(tensor.equal(whole_of(2, 5)));
  kept.clear();
  CHECK(nccl.counts().bytes == 0);
  CHECK(nccl.misuses().empty());
}

TEST_CASE("a slot may outlive its communicator", "[comm][nccl_memory]") {
  const NcclSubstitute nccl({.version = version_with_slots()});
  std::vector<std::shared_ptr<SymmMemBuffer>> kept(2);
  const auto errors =
      errors_on_nccl(nccl, {}, [&](NcclRank& rank) { kept[rank.world->rank()] = make_slot(*rank.world, SlotUse::kGathers, 16); });
  CHECK(errors == no_errors(2));
  kept.clear();
  CHECK(nccl.counts().bytes == 0);
  CHECK(nccl.misuses().empty());
}

TEST_CASE("after an error or an abort nothing stays registered or allocated", "[comm][nccl_memory]") {
  for (const bool is_aborted : {false, true}) {
    NcclSubstitute::Options options{.version = version_with_slots()};
    if (!is_aborted) options.async_error = {.rank = 1, .launch = 2};
    const NcclSubstitute nccl(options);
    const auto errors = errors_on_nccl(nccl, {.world_size = 3}, [&](NcclRank& rank) {
      const auto slot = make_slot(*rank.world, SlotUse::kGathers, 24), unused = make_slot(*rank.world, SlotUse::kGathers, 48);
      gather_into(*slot, *rank.world, 1);
      if (is_aborted && rank.world->rank() == 1) {
        rank.world->abort("the user gave up");
        throw CommError("gave up");
      }
      gather_into(*slot, *rank.world, 2);
    });
    for (const std::string& error : errors)
      CHECK_THAT(error, Contains(is_aborted ? "gave up" : "the peer has closed the connection"));
    CHECK(nccl.counts().windows == 2 * 3);
    CHECK(nccl.counts().bytes == 0);
    CHECK(nccl.misuses().empty());
  }
}

TEST_CASE("a window that cannot be registered ends the group on all ranks", "[comm][nccl_memory]") {
  const NcclSubstitute nccl({.version = version_with_slots(), .register_fails = NcclSubstitute::Place{.rank = 1, .launch = 2}});
  const auto errors = errors_on_nccl(nccl, {.world_size = 2}, [](NcclRank& rank) {
    const auto slot = make_slot(*rank.world, SlotUse::kGathers, 16);
    expect(gather_into(*slot, *rank.world, 1).equal(whole_of(2, 1)), "gathered");
    make_slot(*rank.world, SlotUse::kGathers, 16);
  });
  for (const std::string& error : errors)
    CHECK_THAT(error, Contains("memory for gathers") && Contains("a handle could not be exported"));
  CHECK(nccl.counts().bytes == 0);
  CHECK(nccl.misuses().empty());
}

TEST_CASE("while a graph is captured slots keep no events", "[comm][nccl_memory]") {
  const NcclSubstitute nccl({.version = version_with_slots()});
  const auto errors = errors_on_nccl(nccl, {}, [](NcclRank& rank) {
    const auto slot = make_slot(*rank.world, SlotUse::kGathers, 16);
    gather_into(*slot, *rank.world, 1);
    rank.streams->set_capturing(true);
    gather_into(*slot, *rank.world, 2);
    gather_into(*slot, *rank.world, 3);
    rank.streams->set_capturing(false);
    expect(gather_into(*slot, *rank.world, 4).equal(whole_of(2, 4)), "gathered");
    expect(rank.streams->captured_events_asked() == 0, "none is asked");
    rank.streams->drop_graphs();
  });
  CHECK(errors == no_errors(2));
  CHECK(nccl.misuses().empty());
}

TEST_CASE("gathers by copy engines are asked of the communicator for gathers alone", "[comm][nccl_memory]") {
  for (const bool is_asked : {false, true}) {
    const NcclSubstitute nccl({.version = version_with_slots()});
    const auto errors = errors_on_nccl(nccl, {.use_copy_engine_all_gather = is_asked}, [](NcclRank& rank) {
      all_gather(*rank.world, at::zeros({16}, at::kByte), piece_of(*rank.world, 1));
      all_reduce(*rank.world, at::ones({3}));
      const std::vector<int> both = {0, 1};
      const auto group = rank.world->split(both, "same");
      all_gather(*group, at::zeros({16}, at::kByte), piece_of(*rank.world, 1));
    });
    CHECK(errors == no_errors(2));
    const int policy = is_asked ? NCCL_CTA_POLICY_ZERO : NCCL_CTA_POLICY_DEFAULT;
    for (const int rank : {0, 1}) CHECK(nccl.cta_policies(rank) == std::vector<int>{policy, 0, policy});
    CHECK(nccl.misuses().empty());
  }
}

TEST_CASE("gathers by copy engines are refused of an older NCCL", "[comm][nccl_memory]") {
  const auto refusal = [](NcclSubstitute::Options options) {
    const NcclSubstitute nccl(std::move(options));
    const auto errors = errors_on_nccl(nccl, {.world_size = 1, .use_copy_engine_all_gather = true}, [](NcclRank&) {});
    CHECK(nccl.misuses().empty());
    return errors[0];
  };
  CHECK_THAT(refusal({.version = 22705}), Contains("need NCCL 2.29 or later, found 2.27.5"));
  // It has them, for windows on both sides.
  CHECK_THAT(refusal({.version = 22809}), Contains("need NCCL 2.29 or later, found 2.28.9"));
  CHECK_THAT(refusal({.missing_symbol = "ncclMemAlloc"}), Contains("use_copy_engine_all_gather"));
  CHECK(refusal({.version = 22907}).empty());
}

TEST_CASE("where NCCL wants windows on both sides none is made, which one line in the log says", "[comm][nccl_memory]") {
  for (const bool has_windows : {true, false}) {
    const LoggedLines logged;
    // Each version is said once.
    const NcclSubstitute nccl({.version = has_windows ? 22808 : 22806, .has_windows = has_windows});
    const auto errors = errors_on_nccl(nccl, {}, [](NcclRank& rank) {
      expect(why_no_slots(*rank.world).empty(), "no error");
      for (const auto use : {SlotUse::kGathers, SlotUse::kReductions})
        for (int i = 0; i < 2; ++i) expect(make_slot(*rank.world, use, 100) == nullptr, "no slot");
    });
    CHECK(errors == no_errors(2));
    CHECK(logged.count(fmt::format("symmetric memory does nothing with NCCL 2.28.{}", has_windows ? 8 : 6)) == 1);
    CHECK(logged.count("\n") == 1);
    CHECK(nccl.counts().windows == 0);
    CHECK(nccl.counts().bytes == 0);
    CHECK(nccl.misuses().empty());
  }
}

TEST_CASE("the substitute's windows are those of its version", "[comm][nccl_memory]") {
  const auto window_without_devices = [](int version) {
    const NcclSubstitute nccl({.version = version, .has_windows = false});
    const NcclApi& api = nccl.api();
    ncclUniqueId id;
    REQUIRE(api.get_unique_id(&id) == ncclSuccess);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclComm_t comm = nullptr;
    REQUIRE(api.comm_init_rank_config(&comm, 1, id, 0, &config) == ncclSuccess);
    void* memory = nullptr;
    REQUIRE(api.mem_alloc(&memory, kBlock) == ncclSuccess);
    ncclWindow_t window = nullptr;
    REQUIRE(api.comm_window_register(comm, memory, kBlock, &window, NCCL_WIN_COLL_SYMMETRIC) == ncclSuccess);
    if (window != nullptr) REQUIRE(api.comm_window_deregister(comm, window) == ncclSuccess);
    REQUIRE(api.mem_free(memory) == ncclSuccess);
    REQUIRE(api.comm_finalize(comm) == ncclSuccess);
    REQUIRE(api.comm_destroy(comm) == ncclSuccess);
    CHECK(nccl.misuses().empty());
    return window != nullptr;
  };
  CHECK(window_without_devices(22707));
  CHECK(window_without_devices(22809));
  CHECK_FALSE(window_without_devices(22907));
  CHECK_FALSE(window_without_devices(23007));
}

TEST_CASE("a captured slot that goes stays registered and allocated until the group ends, which one line says",
          "[comm][nccl_memory]") {
  const LoggedLines logged;
  const NcclSubstitute nccl({.version = version_with_slots()});
  const auto errors = errors_on_nccl(nccl, {}, [&](NcclRank& rank) {
    const auto group = rank.world->split(std::vector<int>{0, 1}, "graph");  // each group is said once
    const auto stream = rank.streams->make_stream(StreamPriority::kNormal);
    {
      const HostStreams::Current current(stream);
      auto slot = make_slot(*group, SlotUse::kGathers, 16);
      rank.streams->set_capturing(true);
      gather_into(*slot, *group, 1);
      rank.streams->set_capturing(false);
      slot.reset();
    }
    rank.streams->synchronize(stream);
    all_reduce(*rank.world, at::ones({1}));
    expect(nccl.counts().bytes == 2 * kBlock, "the graph may run again");
    all_reduce(*rank.world, at::ones({1}));
    rank.streams->drop_graphs();
  });
  CHECK(errors == no_errors(2));
  CHECK(logged.count("group 'graph[0,1]': a CUDA graph has captured collectives of symmetric memory") == 1);
  CHECK(nccl.counts().bytes == 0);
  CHECK(nccl.misuses().empty());
}

TEST_CASE("memory that a graph may use is not freed with the group", "[comm][nccl_memory]") {
  const NcclSubstitute nccl({.version = version_with_slots()});
  std::vector<std::shared_ptr<HostStreams>> streams(2);
  const auto errors = errors_on_nccl(nccl, {}, [&](NcclRank& rank) {
    streams[rank.world->rank()] = rank.streams;
    const auto slot = make_slot(*rank.world, SlotUse::kGathers, 16);
    rank.streams->set_capturing(true);
    gather_into(*slot, *rank.world, 1);
    rank.streams->set_capturing(false);
  });
  CHECK(errors == no_errors(2));
  CHECK(nccl.counts().bytes == 2 * kBlock);
  for (const auto& of_rank : streams) of_rank->drop_graphs();
}

}  // namespace fsdp::test
