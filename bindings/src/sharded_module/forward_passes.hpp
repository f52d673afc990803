#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace fsdp::python {

/// Forwards of the modules of one call of fully_shard. A pass is over when all modules have run and none runs any more.
class ForwardPasses {
 public:
  explicit ForwardPasses(size_t modules) : waits_for_(modules, true) {}

  size_t modules() const { return waits_for_.size(); }
  bool is_inside() const { return depth_ > 0; }
  void enter(size_t module) {
    ++depth_;
    waits_for_[module] = false;
  }
  /// True if that was the pass's last; another one begins.
  bool leave() {
    --depth_;
    const bool is_over = depth_ == 0 && std::none_of(waits_for_.begin(), waits_for_.end(), [](bool waits) { return waits; });
    if (is_over) begin_anew();
    return is_over;
  }
  /// Whatever was under way.
  void begin_anew() {
    depth_ = 0;
    waits_for_.assign(waits_for_.size(), true);
  }

 private:
  int depth_ = 0;                ///< forwards under way
  std::vector<bool> waits_for_;  ///< by module: it has not run yet in this pass
};

}  // namespace fsdp::python
