#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <vector>

#include "module/state/owned_group.hpp"

namespace fsdp {

class ModuleState;

/// One of the modules that share a state.
struct Unit {
  const torch::nn::Module* module;  ///< only compared: it may be gone
  std::string path;                 ///< from the parent's module; "" without a parent
  std::weak_ptr<const torch::nn::Module> alive = {};  ///< for a module that a shared_ptr owns
};

/// Where a state stands among those of the modules around and below, and the names that follow from it. Those are right
/// once a root has named all below it.
class TreePosition {
 public:
  /// units: in the order given to fully_shard; one or more.
  explicit TreePosition(std::vector<Unit> units) : units_(std::move(units)) {}

  const std::vector<Unit>& units() const { return units_; }
  const std::string& name() const { return name_; }  ///< path from the root; "" for the root itself
  const std::string& description() const;            ///< for messages: the name, or "root"
  bool is_root() const { return parent_.expired(); }
  std::shared_ptr<ModuleState> parent() const { return parent_.lock(); }
  /// Directly below, in depth-first order.
  const std::vector<std::shared_ptr<ModuleState>>& nested() const { return nested_; }

  /// A module around has been sharded, and met this unit there.
  void set_path(const torch::nn::Module& module, const std::string& path);
  void set_parent(const std::shared_ptr<ModuleState>& parent) { parent_ = parent; }
  void add_nested(std::shared_ptr<ModuleState> state) { nested_.push_back(std::move(state)); }

  /// above: the parent's name.
  void set_name_below(const std::string& above);
  /// Returns the parameter's name from the root on.
  std::string full_name(const OwnedParam& param, const std::string& above) const;

 private:
  std::vector<Unit> units_;
  std::string name_;
  std::weak_ptr<ModuleState> parent_;
  std::vector<std::shared_ptr<ModuleState>> nested_;
};

}  // namespace fsdp
