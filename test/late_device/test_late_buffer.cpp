// Memory that knows the stream that it goes back to: who waits when it does, and for how much.
#include <catch2/catch.hpp>

#include <ATen/ATen.h>

#include <optional>

#include "collectives/stream_buffer.hpp"
#include "late_capture.hpp"
#include "stream_calls.hpp"

namespace fsdp::test {
namespace {

at::Tensor filled(float value) { return at::full({64}, value, at::TensorOptions(late(0))); }
bool is_filled_with(const at::Tensor& tensor, float value) { return tensor.cpu().equal(at::full({64}, value)); }
int waits_so_far() { return LateDevices::streams(0)->waits(); }
void wait_on_host(c10::Stream stream) { guard_of_late().synchronizeStream(stream); }

/// Made and filled on the current stream.
StreamBuffer buffer_of(float value) {
  StreamBuffer buffer;
  buffer.set(filled(value));
  buffer.note_readable();
  return buffer;
}

}  // namespace

TEST_CASE("memory goes back to the stream that it was allocated for behind the uses that were noted", "[late][buffer]") {
  for (const bool is_noted : {true, false}) {
    const LateDevices devices({});
    const auto here = current_stream_of(), other = new_stream();
    auto buffer = buffer_of(3);
    at::Tensor seen;
    std::optional<Stall> stall;
    {
      const c10::StreamGuard there(other);
      if (is_noted)
        buffer.begin_use();
      else
        let_wait(other, here);
      stall.emplace();
      seen = buffer.bytes() + 1;
      CHECK(buffer.owner() == here);
      buffer.reset();  // on a stream that it does not belong to
    }
    CHECK(!buffer.bytes().defined());
    const auto next = filled(7);
    if (!is_noted) wait_on_host(here);
    stall->end();
    guard_of_late().synchronizeDevice(0);
    CHECK(is_filled_with(seen, 4) == is_noted);
  }
}

TEST_CASE("where one stream does it all nothing waits, nor on the host", "[late][buffer]") {
  const LateDevices devices({});
  const int before = waits_so_far();
  {
    auto buffer = buffer_of(1);
    buffer.begin_use();
    buffer.record_ready();
    buffer.wait_until_ready();
    buffer.join_uses();
    buffer.record_last_use();
    CHECK(!buffer.let_owner_wait());
    buffer.note_use();
    buffer.reset();
    buffer = buffer_of(2);
  }
  CHECK(waits_so_far() == before);

  StreamBuffer on_host;
  on_host.begin(at::kCPU);
  on_host.set(at::ones({4}));
  on_host.note_readable();
  const auto beside = at::ones({4});
  on_host.hold(beside);
  CHECK(beside.use_count() == 1);
  CHECK(!on_host.owner());
  on_host.record_last_use();
  CHECK(!on_host.let_owner_wait());
  on_host.reset();
  CHECK(!on_host.bytes().defined());
}

TEST_CASE("a stream that uses it later goes on behind what has made it readable, from the second time on behind no more",
          "[late][buffer]") {
  const LateDevices devices({});
  const auto other = new_stream();
  StreamBuffer buffer;
  for (const bool has_several : {false, true}) {
    buffer.set(filled(5));
    buffer.note_readable();
    Stall stall;
    at::Tensor seen;
    {
      const c10::StreamGuard there(other);
      buffer.begin_use();
      buffer.begin_use();  // behind it already
      seen = buffer.bytes() + 1;
    }
    if (!has_several) stall.end();
    wait_on_host(other);  // if it waited for more, for ever
    stall.end();
    CHECK(is_filled_with(seen, 6));
    buffer.reset();
  }
}

TEST_CASE("behind a launch, and behind the last use of what is kept, another stream waits for that alone", "[late][buffer]") {
  const LateDevices devices({});
  const auto other = new_stream();
  auto buffer = buffer_of(2);
  buffer.record_ready();
  const Stall stall;
  const c10::StreamGuard there(other);
  buffer.wait_until_ready();
  const auto seen = buffer.bytes() * 2;
  wait_on_host(other);
  CHECK(is_filled_with(seen, 4));
  buffer.drop();
}

TEST_CASE("its owner waits for a last use that was marked, and not for what was queued behind it", "[late][buffer]") {
  const LateDevices devices({});
  const auto here = current_stream_of(), other = new_stream();
  auto buffer = buffer_of(2);
  std::optional<Stall> stall;
  {
    const c10::StreamGuard there(other);
    let_wait(other, here);
    buffer.record_last_use();
    stall.emplace();
  }
  const int before = waits_so_far();
  buffer.reset();
  CHECK(waits_so_far() == before + 1);
  wait_on_host(here);  // if it waited for more, for ever
}

TEST_CASE("memory that it holds beside its own stays until it lets go, whoever else does", "[late][buffer]") {
  const LateDevices devices({});
  auto buffer = buffer_of(1);
  auto beside = filled(2);
  const void* memory = beside.const_data_ptr();
  buffer.hold(beside);
  buffer.hold({});
  beside.reset();
  CHECK(filled(3).const_data_ptr() != memory);
  buffer = StreamBuffer();
  const auto first = filled(4), second = filled(5), third = filled(6);
  CHECK((first.const_data_ptr() == memory || second.const_data_ptr() == memory || third.const_data_ptr() == memory));
}

TEST_CASE("what is moved over, or destroyed, goes as what is reset; where its streams are gone, too", "[late][buffer]") {
  std::optional<StreamBuffer> late_one;
  {
    const LateDevices devices({});
    const auto use_elsewhere = [&](StreamBuffer& buffer) {
      const c10::StreamGuard there(new_stream());
      buffer.begin_use();
    };
    auto buffer = buffer_of(1);
    use_elsewhere(buffer);
    int before = waits_so_far();
    buffer = buffer_of(2);
    CHECK(waits_so_far() == before + 1);
    {
      auto moved = std::move(buffer);
      use_elsewhere(moved);
      before = waits_so_far();
    }
    CHECK(waits_so_far() == before + 1);
    late_one.emplace(buffer_of(3));
    use_elsewhere(*late_one);
  }
  CHECK_NOTHROW(late_one.reset());  // which is logged
}

TEST_CASE("the only stream that counts behind a join is the one that has joined the others", "[late][buffer]") {
  const LateDevices devices({});
  const auto here = current_stream_of(), other = new_stream(), third = new_stream();
  auto buffer = buffer_of(1);
  for (const auto stream : {other, third}) {
    const c10::StreamGuard there(stream);
    buffer.begin_use();
  }
  const int before = waits_so_far();
  buffer.join_uses();
  CHECK(waits_so_far() == before + 2);
  CHECK(!buffer.let_owner_wait());  // that is its owner
  CHECK(buffer.owner() == here);
}

TEST_CASE("a stream from before a capture does not come into it, and one that does is joined", "[late][buffer]") {
  const LateDevices devices({});
  const c10::StreamGuard before(new_stream());
  auto kept = buffer_of(1), filled_before = buffer_of(2);
  guard_of_late().synchronizeDevice(0);
  const c10::StreamGuard on(new_stream());
  const auto side = new_stream();
  at::Tensor sum;
  LateGraph graph;
  graph.capture([&] {
    kept.begin_use();
    sum = kept.bytes() + 1;
    kept.join_uses();
    filled_before.reset();
    CHECK(is_capturing(before.current_stream()) == false);
    let_wait(side, current_stream_of());
    StreamBuffer of_side;
    {
      const c10::StreamGuard there(side);
      of_side = buffer_of(4);
    }
    of_side.begin_use();
    sum.add_(of_side.bytes());
    of_side.reset();  // else `side` would be left unjoined
  });
  graph.replay();
  CHECK(is_filled_with(sum, 6));
}

}  // namespace fsdp::test
