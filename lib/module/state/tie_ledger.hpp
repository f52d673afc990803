#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "module/state/registration.hpp"

namespace fsdp {

class ModuleState;
class ParamGroup;

/// An entry of a module's parameter table that holds the unsharded parameter of another state's parameter: a tie across
/// groups that no module around both has settled yet.
struct SharedEntry {
  Registration place;  ///< its `param` means nothing
  std::string name;    ///< relative to its unit
  size_t unit = 0;
  std::weak_ptr<ParamGroup> owner;
  /// Undefined where the module is gone.
  at::Tensor unsharded_param() const;
};

/// The parameters that one state shares with others: which of its entries hold another's, and who holds its own. Both
/// go to the first module around them all that is sharded; until then a step throws.
class TieLedger {
 public:
  explicit TieLedger(std::vector<SharedEntry> entries = {}) : entries_(std::move(entries)) {}

  const std::vector<SharedEntry>& entries() const { return entries_; }
  /// States that have such entries of this one's parameters.
  const std::vector<std::weak_ptr<ModuleState>>& sharers() const { return sharers_; }
  void add_sharer(std::weak_ptr<ModuleState> state) { sharers_.push_back(std::move(state)); }

  /// A module around has taken parameters over: their entries hold sharded parameters now.
  void forget_settled();
  /// Throws StateError, naming the state, if an entry is not settled.
  void check(const std::string& state) const;

 private:
  std::vector<SharedEntry> entries_;
  std::vector<std::weak_ptr<ModuleState>> sharers_;
};

}  // namespace fsdp
