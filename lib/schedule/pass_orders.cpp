#include "schedule/pass_orders.hpp"

namespace fsdp {

void PassOrders::begin_forward(bool records_autograd) {
  begin(records_autograd ? Pass::kForward : Pass::kInference);
  forwards_ = 1;
}

void PassOrders::begin_backward(bool is_of_forward) {
  if (is_of_forward) {
    end();
    forwards_before_backward_ = forwards_;
  }
  ++backwards_;
  begin(Pass::kBackward);
}

void PassOrders::begin(Pass pass) {
  pass_ = pass;
  order_ = pass == Pass::kForward ? &forward_ : pass == Pass::kInference ? &inference_ : &backward_;
  order_->begin_pass();
}

void PassOrders::end() {
  const int generation = backward_.generation();
  order_->end_pass();
  if (backward_.generation() != generation) learned_in_ = backwards_;
  pass_ = Pass::kNone;
}

void PassOrders::abandon() {
  for (auto* order : {&forward_, &backward_, &inference_}) order->abandon_pass();
  pass_ = Pass::kNone;
}

/// A backward of several forwards goes through each of them.
ExecOrder::Repeats PassOrders::repeats() const {
  const bool may_repeat = !is_backward() || repeats_forward();
  return may_repeat ? ExecOrder::Repeats::kAsLearned : ExecOrder::Repeats::kAnotherOrder;
}

bool PassOrders::use(int group, std::span<const int> operands) {
  const bool starts_over = order_->use(group, operands, repeats()) == ExecOrder::Progress::kStartedOver;
  if (is_forward()) forwards_ += starts_over;
  return starts_over;
}

}  // namespace fsdp
