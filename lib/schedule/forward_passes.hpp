#pragma once

#include <algorithm>
#include <cstddef>
#include <optional>
#include <vector>

namespace fsdp {

/// Forwards of the modules of one call of fully_shard. A pass is over when all modules have run and none runs any more.
class ForwardPasses {
 public:
  explicit ForwardPasses(size_t modules) : waits_for_(modules, true) {}

  size_t modules() const { return waits_for_.size(); }
  bool is_inside() const { return !under_way_.empty(); }
  /// Forwards that are under way, one inside another.
  size_t depth() const { return under_way_.size(); }
  /// Comes before anything that may throw, on the thread of the forward. Until `enter`, the module's forward is not under way.
  void try_to_enter(size_t module) { tried_ = module; }
  void enter(size_t module) {
    tried_.reset();
    under_way_.push_back(module);
    waits_for_[module] = false;
  }
  /// Whether the forward that ends now has entered. It has not if its hook has thrown, or one in front of it: the innermost
  /// forward is the one around it then, which goes on.
  bool ends_what_has_entered(size_t module) {
    const bool has_failed = tried_ == module;
    tried_.reset();
    return !has_failed && !under_way_.empty() && under_way_.back() == module;
  }
  /// True if that was the pass's last; another one begins.
  bool leave() {
    under_way_.pop_back();
    if (is_inside() || std::ranges::find(waits_for_, true) != waits_for_.end()) return false;
    begin_anew();
    return true;
  }
  /// Whatever was under way.
  void begin_anew() {
    tried_.reset();
    under_way_.clear();
    waits_for_.assign(waits_for_.size(), true);
  }

 private:
  std::optional<size_t> tried_;    ///< the module whose hook is before `enter`
  std::vector<size_t> under_way_;  ///< the modules of the forwards that are, the innermost last
  std::vector<bool> waits_for_;    ///< by module: it has not run yet in this pass
};

}  // namespace fsdp
