#pragma once

#include <torch/optim/optimizer.h>

#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "api/state_dict/optimizer_params.hpp"
#include "fsdp/incompatible_keys.hpp"

namespace fsdp {

enum class SavedIn : uint8_t {
  kDict,       ///< it is this optimizer's alone: what it lacks is missing, what is left over unexpected
  kCheckpoint  ///< it may have other stages' parameters and another library's options, but its class, groups and options have
               ///< to fit before anything is loaded
};

/// What was saved of an optimizer. Whoever reads it says which states there are, but does not say where they go.
struct SavedOptimizer {
  struct SavedGroup {
    std::map<std::string, OptimizerOption> options = {};
    std::string fault = {};  ///< why they could not be read; "" if they could
  };

  SavedIn kept_in;
  OptimizerKeys keys = OptimizerKeys::kName;
  std::string optimizer = {};  ///< "AdamW", ...
  std::vector<SavedGroup> groups = {};
  std::map<std::string, size_t> group_of = {};  ///< by the parameter's key
  std::set<std::string> with_state = {};        ///< keys
  /// Is given, in order, the parameters whose saved state is to be loaded. Returns false where it does not fit and is to be
  /// left as it is; adds why to `misfits`, and may do so where it returns true.
  std::function<bool(size_t position, const std::string& key, IncompatibleKeys& misfits)> take = {};
};

/// Decides what of a saved optimizer goes where, and changes nothing until `apply`.
class OptimizerPlan {
 public:
  /// What becomes of a parameter's state.
  enum class Fate : char { kLeft = 'l', kNone = 'n', kLoaded = 's' };
  struct Decisions {
    std::vector<Fate> states = {};                                     ///< by position
    std::vector<std::map<std::string, OptimizerOption>> options = {};  ///< by group, all of them; empty: left as they are
    IncompatibleKeys misfits = {};
    bool is_refused = false;  ///< nothing is loaded
  };
  using MakeState = std::function<std::unique_ptr<torch::optim::OptimizerParamState>(size_t position)>;

  /// params, optimizer: outlive this.
  OptimizerPlan(const std::vector<OptimizerParam>& params, torch::optim::Optimizer& optimizer, const SavedOptimizer& saved);
  /// Takes over what another rank has decided for the same parameters.
  OptimizerPlan(const std::vector<OptimizerParam>& params, torch::optim::Optimizer& optimizer, Decisions decisions)
      : params_(params), optimizer_(optimizer), decisions_(std::move(decisions)) {}

  const Decisions& decisions() const { return decisions_; }
  const IncompatibleKeys& misfits() const { return decisions_.misfits; }
  /// Writes options and replaces states, each when the old one is gone, so that both are never there.
  void apply(const MakeState& make_state);

 private:
  bool has_same_groups(const SavedOptimizer& saved) const;
  void decide_class(const SavedOptimizer& saved);
  void decide_options(const SavedOptimizer& saved);
  Fate decide_state(size_t position, const std::string& key, const SavedOptimizer& saved);
  void decide_states(const SavedOptimizer& saved);

  const std::vector<OptimizerParam>& params_;
  torch::optim::Optimizer& optimizer_;
  Decisions decisions_;
};

}  // namespace fsdp
