// Graphs of the device: that they replay what was captured, and refuse what CUDA's refuse.
#include <catch2/catch.hpp>

#include <ATen/ATen.h>

#include "base/side_stream.hpp"
#include "late_capture.hpp"
#include "stream_calls.hpp"

namespace fsdp::test {
namespace {

using namespace std::chrono_literals;
using Catch::Contains;

at::Tensor full_of(double value) { return at::full({8}, value, at::TensorOptions(late(0)).dtype(at::kFloat)); }
bool holds_only(const at::Tensor& tensor, double value) { return tensor.cpu().equal(at::full({8}, value, at::kFloat)); }

/// Devices, and a stream that may be captured as the current one.
struct Captured {
  explicit Captured(HostStreams::Options options = {}) : devices(options), guard(new_stream()) {}
  LateDevices devices;
  c10::StreamGuard guard;
};

std::string error_of_capture(const std::function<void()>& body) {
  LateGraph graph;
  try {
    graph.capture(body);
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

}  // namespace

TEST_CASE("what is captured runs when it is replayed, each time, and not before", "[late][capture]") {
  const Captured on;
  auto x = full_of(1), sum = full_of(0);
  LateGraph graph;
  graph.capture([&] { sum.add_(x * 2); });
  CHECK(holds_only(sum, 0));
  graph.replay();
  x.fill_(10);
  graph.replay();
  CHECK(holds_only(sum, 22));
}

TEST_CASE("a stream that waits for a captured one is captured with it, and its order holds in every replay",
          "[late][capture]") {
  for (const uint64_t seed : {1, 2, 3}) {
    const Captured on({.seed = seed, .max_delay = 500us, .has_own_paces = true});
    const auto side = new_stream();
    auto x = full_of(1), y = full_of(0);
    LateGraph graph;
    graph.capture([&] {
      x.mul_(2);
      CHECK(is_capturing(side) == false);
      let_wait(side, current_stream_of());
      CHECK(is_capturing(side) == true);
      {
        const c10::StreamGuard there(side);
        y.copy_(x);
      }
      let_wait(current_stream_of(), side);
      x.add_(y);
    });
    CHECK(is_capturing(side) == false);
    for (int turn = 0; turn < 3; ++turn) graph.replay();
    CHECK(holds_only(x, 64));
  }
}

TEST_CASE("branches of a graph that do not wait for each other run in any order", "[late][capture]") {
  int early = 0;
  for (uint64_t seed = 1; seed <= 8; ++seed) {
    const Captured on({.seed = seed, .max_delay = 2ms, .has_own_paces = true});
    const auto side = new_stream();
    auto x = full_of(1), seen = full_of(0);
    LateGraph graph;
    graph.capture([&] {
      let_wait(side, current_stream_of());
      x.fill_(2);
      {
        const c10::StreamGuard there(side);
        seen.copy_(x);  // nothing says whether before or behind
      }
      let_wait(current_stream_of(), side);
    });
    for (int turn = 0; turn < 4; ++turn) {
      x.fill_(1);
      graph.replay();
      early += holds_only(seen, 1) ? 1 : 0;
    }
  }
  CHECK(early > 0);
}

TEST_CASE("memory that is allocated in a capture is the graph's as long as it lives, and reused within it",
          "[late][capture]") {
  const Captured on;
  auto before = full_of(1);
  const void* freed_before = before.const_data_ptr();
  before.reset();
  auto out = full_of(0);
  const void *first = nullptr, *second = nullptr;
  {
    LateGraph graph;
    graph.capture([&] {
      auto a = full_of(3);
      first = a.const_data_ptr();
      out.add_(a);
      a.reset();
      auto b = full_of(4);
      second = b.const_data_ptr();
      out.add_(b);
    });
    CHECK(first == second);
    CHECK(first != freed_before);
    std::vector<at::Tensor> others;
    for (int i = 0; i < 8; ++i) others.push_back(full_of(-1));
    for (const auto& other : others) CHECK(other.const_data_ptr() != first);
    graph.replay();
    CHECK(holds_only(out, 7));
    for (const auto& other : others) CHECK(holds_only(other, -1));
  }
}

TEST_CASE("memory from before a capture that is freed in it is another's when the graph is replayed", "[late][capture]") {
  const Captured on;
  auto input = full_of(1), out = full_of(0);
  LateGraph graph;
  graph.capture([&] {
    out.copy_(input);
    input.reset();
  });
  const auto next = full_of(5);
  graph.replay();
  CHECK(holds_only(out, 5));
}

TEST_CASE("a stream that is left unjoined at the end of a capture is an error", "[late][capture]") {
  const Captured on;
  const auto side = new_stream();
  auto x = full_of(1);
  CHECK_THAT(error_of_capture([&] {
               let_wait(side, current_stream_of());
               const c10::StreamGuard there(side);
               x.add_(1);
             }),
             Contains("unjoined work: 1 of 2 streams"));
  CHECK_THAT(error_of_capture([&] { let_wait(side, current_stream_of()); }), Contains("unjoined work"));
  CHECK_THAT(error_of_capture([&] {
               let_wait(side, current_stream_of());
               let_wait(current_stream_of(), side);
               const c10::StreamGuard there(side);
               x.add_(1);  // behind what was joined
             }),
             Contains("unjoined work"));
  CHECK(error_of_capture([&] {
          let_wait(side, current_stream_of());
          let_wait(current_stream_of(), side);
        }) == "");
  x.add_(1);  // both streams run again what they are given
  CHECK(holds_only(x, 2));
}

TEST_CASE("a captured stream that waits for an event from outside, or of another capture, is an error", "[late][capture]") {
  const Captured on;
  const auto side = new_stream(), other = new_stream();
  c10::Event before(kLate), within(kLate);
  before.record(side);
  CHECK_THAT(error_of_capture([&] { before.block(current_stream_of()); }), Contains("uncaptured work in another stream"));
  CHECK_THAT(error_of_capture([&] {
               try {
                 before.block(current_stream_of());
               } catch (const c10::Error&) {
               }
             }),
             Contains("invalidated by an earlier error"));
  CHECK(error_of_capture([&] { within.record(current_stream_of()); }) == "");
  CHECK_THAT(error_of_capture([&] { within.block(current_stream_of()); }), Contains("uncaptured work in another stream"));
  CHECK_THROWS_WITH(within.block(current_stream_of()), Contains("last recorded in a capturing stream"));
  CHECK_THAT(error_of_capture([&] {
               within.record(current_stream_of());
               const c10::StreamGuard there(other);
               LateGraph second;
               second.capture([&] { within.block(current_stream_of()); });
             }),
             Contains("merge of separate capture sequences"));
  CHECK(error_of_capture([&] { c10::Event(kLate).block(current_stream_of()); }) == "");
}

TEST_CASE("a host that waits or asks while it captures is an error", "[late][capture]") {
  const Captured on;
  const auto x = full_of(1);
  const auto side = new_stream();
  c10::Event event(kLate);
  event.record(side);
  const std::vector<std::function<void()>> asking = {
      [&] { x.sum().item(); }, [&] { x.cpu(); }, [&] { guard_of_late().synchronizeStream(side); },
      [&] { guard_of_late().synchronizeDevice(0); }, [&] { side.query(); }, [&] { event.query(); },
      [&] { event.synchronize(); }};
  for (size_t i = 0; i < asking.size(); ++i) {
    INFO("question " << i);
    CHECK_THAT(error_of_capture(asking[i]), Contains("not permitted"));
  }
  CHECK_THAT(error_of_capture([&] {
               event.record(current_stream_of());
               event.query();
             }),
             Contains("not permitted"));
}

TEST_CASE("the default stream is not captured, and does not wait for one that is", "[late][capture]") {
  const LateDevices devices({});
  CHECK_THAT(error_of_capture([] {}), Contains("default stream"));
  const auto by_default = guard_of_late().getDefaultStream(late(0));
  const c10::StreamGuard guard(new_stream());
  CHECK_THAT(error_of_capture([&] { let_wait(by_default, current_stream_of()); }), Contains("default stream"));
}

TEST_CASE("memory of which the allocator knows that another stream uses it is free when that is done",
          "[late][device]") {
  const LateDevices devices({});
  const auto other = new_stream();
  std::atomic<bool> is_over = false;
  auto used = full_of(1);
  const void* memory = used.const_data_ptr();
  let_wait(other, current_stream_of());
  const int recorded = streams_recorded(0);
  at::Tensor seen;
  {
    const c10::StreamGuard guard(other);
    HostStreams::enqueue(handle_of(other), [&] {
      while (!is_over) std::this_thread::yield();
    });
    seen = used + 1;
  }
  used.record_stream(other);
  used.reset();
  CHECK(streams_recorded(0) == recorded + 1);
  CHECK(full_of(3).const_data_ptr() != memory);
  is_over = true;
  guard_of_late().synchronizeStream(other);
  CHECK(holds_only(seen, 2));
  auto last = full_of(4), one_more = full_of(4);
  CHECK((last.const_data_ptr() == memory || one_more.const_data_ptr() == memory));
}

TEST_CASE("memory that another stream uses is not free while a graph is captured", "[late][capture]") {
  const Captured on;
  const auto side = new_stream();
  auto out = full_of(0);
  LateGraph graph;
  graph.capture([&] {
    auto made = full_of(3);
    const void* memory = made.const_data_ptr();
    let_wait(side, current_stream_of());
    made.record_stream(side);
    {
      const c10::StreamGuard there(side);
      out.add_(made);
    }
    made.reset();
    const auto next = full_of(5);
    CHECK(next.const_data_ptr() != memory);
    let_wait(current_stream_of(), side);
  });
  graph.replay();
  CHECK(holds_only(out, 3));
}

TEST_CASE("nothing is set to a device that is lost", "[late][device]") {
  const LateDevices devices({});
  const c10::impl::VirtualGuardImpl& guard = guard_of_late();
  {
    const LostDevice lost(1);
    CHECK_THROWS_WITH(c10::DeviceGuard(late(1)), Contains("late:1 is lost"));
    CHECK_THROWS_WITH(c10::StreamGuard(guard.getDefaultStream(late(1))), Contains("late:1 is lost"));
    CHECK_THROWS_WITH(at::empty({1}, at::TensorOptions(late(1))), Contains("late:1 is lost"));
    CHECK(guard.getDevice() == late(0));
    const c10::DeviceGuard elsewhere(late(2));
  }
  CHECK_NOTHROW(c10::DeviceGuard(late(1)));
}

}  // namespace fsdp::test
