#pragma once

#include <cstdint>
#include <span>

#include "schedule/exec_order.hpp"

namespace fsdp {

/// The orders of a root's passes, of three kinds, each with its own: a forward without autograd (evaluation, generation)
/// must not unlearn what training does. And how the passes of a step follow each other.
class PassOrders {
 public:
  PassOrders() = default;
  PassOrders(const PassOrders&) = delete;  // it points into itself
  PassOrders& operator=(const PassOrders&) = delete;

  void begin_forward(bool records_autograd);
  /// is_of_forward: of the one that is under way, which ends; else of a graph that was retained.
  void begin_backward(bool is_of_forward);
  void end();
  /// The pass under way did not come to its end.
  void abandon();
  /// The next use, as ExecOrder::use. Returns whether the learned pass is over and begins again: as a second forward before
  /// the backward does.
  bool use(int group, std::span<const int> operands = {});
  /// Whether one of these uses, in their order, would return true.
  bool would_start_over(std::span<const int> groups) const { return order_->would_start_over(groups, repeats()); }

  bool is_forward() const { return pass_ == Pass::kForward || pass_ == Pass::kInference; }
  bool is_inference() const { return pass_ == Pass::kInference; }
  bool is_backward() const { return pass_ == Pass::kBackward; }
  /// Returns the order of the pass that is under way or was the last.
  const ExecOrder& current() const { return *order_; }
  const ExecOrder& forward() const { return forward_; }
  const ExecOrder& backward() const { return backward_; }

  /// As many forwards have begun as before the last backward.
  bool has_all_forwards() const { return forwards_ == forwards_before_backward_; }
  /// In front of the last backward, one that repeats the learned order or more: of a model that was called again, or of a loop.
  bool repeats_forward() const { return forwards_before_backward_ > 1; }
  int backwards() const { return backwards_; }    ///< begun so far
  int learned_in() const { return learned_in_; }  ///< the backward that the learned order is of

 private:
  enum class Pass : uint8_t { kNone, kForward, kInference, kBackward };
  void begin(Pass pass);
  ExecOrder::Repeats repeats() const;

  ExecOrder forward_, backward_, inference_;
  ExecOrder* order_ = &forward_;  // of the pass that is under way or was the last
  Pass pass_ = Pass::kNone;
  int forwards_ = 0, forwards_before_backward_ = 0;  // of this step; of the last one that had a backward
  int backwards_ = 0, learned_in_ = 1;
};

}  // namespace fsdp
