// The device itself: that it computes what the host does, is as late as a GPU, and shows what a GPU might not.
#include <catch2/catch.hpp>

#include <ATen/ATen.h>

#include "late_device.hpp"
#include "stream_calls.hpp"

namespace fsdp::test {
namespace {

using namespace std::chrono_literals;

c10::Stream other_stream() { return guard_of_late().getStreamFromGlobalPool(late(0)); }
c10::Stream late_stream() { return current_stream_of(0); }

at::Tensor ones(int64_t count) { return at::ones({count}, at::TensorOptions(late(0))); }

/// Of a graph of several operators, what differs from the host's.
double difference_of_gradients(int hidden) {
  const auto run = [&](c10::Device device) {
    at::manual_seed(3);
    auto weight = at::randn({hidden, 5}).to(device).requires_grad_();
    auto bias = at::randn({hidden}).to(device).requires_grad_();
    const auto x = at::randn({7, 5}).to(device), target = at::randn({7, hidden}).to(device);
    auto loss = at::mse_loss(at::relu(at::linear(x, weight, bias)).tanh() * 2, target);
    loss.backward();
    return at::cat({loss.reshape({1}).detach(), weight.grad().flatten(), bias.grad()}).cpu();
  };
  return (run(late(0)) - run(at::kCPU)).abs().max().item<double>();
}

}  // namespace

TEST_CASE("operators and their gradients are the host's", "[late][device]") {
  const LateDevices devices({.max_delay = 100us});
  for (const int hidden : {1, 3, 16}) CHECK(difference_of_gradients(hidden) == 0);
  const auto a = at::arange(6, at::TensorOptions(late(0)).dtype(at::kFloat)).view({2, 3});
  CHECK(a.t().contiguous().cpu().equal(at::arange(6, at::kFloat).view({2, 3}).t()));
  CHECK(a.select(1, 1).add(1).cpu().equal(at::tensor({2.f, 5.f})));
  CHECK(at::cat({a, a.to(at::kBFloat16).to(at::kFloat)}).sum().item<float>() == 30);
  auto sums = at::empty({0}, a.options());
  CHECK(at::sum_out(sums, a, {1}).cpu().equal(at::tensor({3.f, 12.f})));
  std::vector<at::Tensor> list = {a.clone(), ones(3)};
  at::_foreach_add_(list, 1);
  CHECK(list[1].cpu().equal(at::full({3}, 2.f)));
  CHECK(a.equal(a.clone()));
}

TEST_CASE("operators return before they have run, and the host waits only where it is counted", "[late][device]") {
  const LateDevices devices({.max_delay = 1ms});
  std::atomic<bool> is_over = false;
  const int before = host_waits(0);
  HostStreams::enqueue(LateDevices::streams(0)->current(), [&] {
    while (!is_over) std::this_thread::yield();
  });
  const auto pinned = at::full({4}, 2.f, at::TensorOptions().pinned_memory(true));
  auto x = ones(4).add_(at::scalar_tensor(1.f));
  x.mul_(pinned.to(late(0), /*non_blocking=*/true));
  auto on_host = at::zeros({4}, at::TensorOptions().pinned_memory(true));
  on_host.copy_(x, /*non_blocking=*/true);
  c10::Event event(kLate);
  event.record(late_stream());
  CHECK(!event.query());
  CHECK(host_waits(0) == before);
  CHECK(on_host.equal(at::zeros({4})));
  is_over = true;
  event.synchronize();
  CHECK(on_host.equal(at::full({4}, 4.f)));
  CHECK(x[0].item<float>() == 4);
  x.cpu();
  guard_of_late().synchronizeDevice(0);
  CHECK(host_waits(0) == before + 4);
}

TEST_CASE("a stream that does not wait for another reads poison, and one that waits reads what was written",
          "[late][device]") {
  for (const bool waits : {false, true}) {
    const LateDevices devices({});
    std::atomic<bool> is_over = false;
    HostStreams::enqueue(LateDevices::streams(0)->current(), [&] {
      while (!is_over) std::this_thread::yield();
    });
    const auto written = ones(64);
    const auto other = other_stream();
    if (waits) let_wait(other, late_stream());
    at::Tensor seen;
    {
      const c10::StreamGuard guard(other);
      seen = written + 1;
    }
    if (waits) is_over = true;
    guard_of_late().synchronizeStream(other);
    is_over = true;
    CHECK(seen.isnan().all().item<bool>() == !waits);
  }
}

TEST_CASE("memory that goes back while another stream has yet to read it is poison there, unless its stream waits",
          "[late][device]") {
  for (const bool waits : {false, true}) {
    const LateDevices devices({});
    const auto other = other_stream();
    std::atomic<bool> is_over = false;
    auto given_back = ones(64);
    let_wait(other, late_stream());
    at::Tensor seen;
    {
      const c10::StreamGuard guard(other);
      HostStreams::enqueue(LateDevices::streams(0)->current(), [&] {
        while (!is_over) std::this_thread::yield();
      });
      seen = given_back + 1;
    }
    given_back.reset();
    if (waits) let_wait(late_stream(), other);
    const auto next = at::empty({1}, at::TensorOptions(late(0)));  // of any size
    if (!waits) guard_of_late().synchronizeStream(late_stream());
    is_over = true;
    guard_of_late().synchronizeDevice(0);
    CHECK(seen.isnan().all().item<bool>() == !waits);
  }
}

TEST_CASE("what is freed is the next tensor's on the same stream, and no other stream's", "[late][device]") {
  const LateDevices devices({});
  auto first = ones(64);
  const void* memory = first.const_data_ptr();
  first.reset();
  const auto other = other_stream();
  at::Tensor elsewhere;
  {
    const c10::StreamGuard guard(other);
    elsewhere = ones(64);
  }
  CHECK(elsewhere.const_data_ptr() != memory);
  elsewhere.reset();
  const auto next = at::empty({64}, at::TensorOptions(late(0)));
  CHECK(next.const_data_ptr() == memory);
  CHECK(next.isnan().all().item<bool>());
}

TEST_CASE("pinned memory that is freed stays until the copies that were queued are done", "[late][device]") {
  const LateDevices devices({});
  std::atomic<bool> is_over = false;
  HostStreams::enqueue(LateDevices::streams(0)->current(), [&] {
    while (!is_over) std::this_thread::yield();
  });
  const auto there = at::full({4}, 2.f, at::TensorOptions().pinned_memory(true)).to(late(0), /*non_blocking=*/true);
  is_over = true;
  CHECK(there.cpu().equal(at::full({4}, 2.f)));
}

TEST_CASE("an operator takes no tensor of the host's but a number", "[late][device]") {
  const LateDevices devices({});
  CHECK_THROWS_WITH(ones(4) + at::ones({4}), Catch::Contains("late:0 and cpu"));
  CHECK_THROWS_WITH(at::cat({ones(4), at::ones({4})}), Catch::Contains("late:0 and cpu"));
  CHECK((ones(4) + at::scalar_tensor(1.f)).cpu().equal(at::full({4}, 2.f)));
}

}  // namespace fsdp::test
