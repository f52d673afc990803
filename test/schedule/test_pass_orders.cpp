// How the passes of a step follow each other: which order is whose, how many forwards come before a backward, and which
// backward an order has been learned in.
#include <catch2/catch.hpp>
#include <vector>

#include "schedule/pass_orders.hpp"

namespace fsdp::test {
namespace {

void run(PassOrders& orders, const std::vector<int>& uses) {
  for (const int group : uses) orders.use(group);
}

void train(PassOrders& orders, const std::vector<int>& forward, const std::vector<int>& backward) {
  orders.begin_forward(/*records_autograd=*/true);
  run(orders, forward);
  orders.begin_backward(/*is_of_forward=*/true);
  run(orders, backward);
  orders.end();
}

}  // namespace

TEST_CASE("each kind of pass learns its own order", "[group][pass_orders]") {
  PassOrders orders;
  CHECK_FALSE(orders.current().follows());
  train(orders, {0, 1, 2}, {2, 1, 0});
  CHECK(orders.forward().learned() == std::vector{0, 1, 2});
  CHECK(orders.backward().learned() == std::vector{2, 1, 0});

  orders.begin_forward(/*records_autograd=*/false);
  CHECK(orders.is_inference());
  CHECK(orders.is_forward());
  CHECK_FALSE(orders.current().follows());
  run(orders, {1, 1, 0});
  CHECK(orders.forward().learned() == std::vector{0, 1, 2});
  orders.end();
  CHECK(orders.current().learned() == std::vector{1, 0});
  CHECK_FALSE(orders.is_forward());
  CHECK_FALSE(orders.is_backward());

  orders.begin_forward(/*records_autograd=*/true);
  CHECK_FALSE(orders.is_inference());
  CHECK(orders.current().follows());
  CHECK(&orders.current() == &orders.forward());
}

TEST_CASE("a backward that goes twice through what was learned has gone through two forwards, or has another order",
          "[group][pass_orders]") {
  PassOrders orders;
  train(orders, {0, 1}, {1, 0});
  train(orders, {0, 1, 0, 1}, {1, 0, 1, 0});
  CHECK(orders.backward().learned() == std::vector{1, 0});
  train(orders, {0, 1}, {1, 0, 1, 0});  // one that reads its groups again
  CHECK(orders.backward().learned() == std::vector{1, 0, 1, 0});
  train(orders, {0, 1}, {1, 0, 1, 0});
  CHECK(orders.backward().generation() == 2);
}

TEST_CASE("as many forwards as the last time, and a backward is due", "[group][pass_orders]") {
  PassOrders orders;
  orders.begin_forward(true);
  CHECK_FALSE(orders.has_all_forwards());  // there has been no backward
  run(orders, {0, 1});
  orders.begin_backward(true);
  run(orders, {1, 0});
  orders.end();
  for (int step = 0; step < 2; ++step) {
    CAPTURE(step);
    orders.begin_forward(true);
    CHECK(orders.has_all_forwards() == (step == 0));  // two in the step before
    run(orders, {0, 1});
    CHECK(orders.use(0));  // it begins again
    CHECK_FALSE(orders.use(1));
    CHECK(orders.has_all_forwards() == (step == 1));
    orders.begin_backward(true);
    run(orders, {1, 0});
    orders.end();
  }
}

TEST_CASE("a backward over a retained graph leaves the count of forwards", "[group][pass_orders]") {
  PassOrders orders;
  train(orders, {0, 1}, {1, 0});
  orders.begin_backward(/*is_of_forward=*/false);
  run(orders, {1, 0});
  orders.end();
  CHECK(orders.backwards() == 2);
  orders.begin_forward(true);
  CHECK(orders.has_all_forwards());
}

TEST_CASE("an order is of the backward that it was learned in", "[group][pass_orders]") {
  PassOrders orders;
  train(orders, {0, 1}, {1, 0});
  CHECK(orders.learned_in() == 1);
  train(orders, {0, 1}, {1, 0});
  CHECK(orders.learned_in() == 1);
  train(orders, {0, 1}, {1, 0, 1});
  CHECK(orders.learned_in() == 3);
}

TEST_CASE("a pass that is abandoned teaches nothing", "[group][pass_orders]") {
  PassOrders orders;
  train(orders, {0, 1}, {1, 0});
  orders.begin_forward(true);
  run(orders, {1});
  orders.abandon();
  CHECK_FALSE(orders.is_forward());
  CHECK_FALSE(orders.current().follows());
  CHECK(orders.forward().learned() == std::vector{0, 1});
}

}  // namespace fsdp::test
