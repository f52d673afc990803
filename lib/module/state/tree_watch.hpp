#pragma once

#include <torch/nn/module.h>

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

namespace fsdp {

struct WalkedModule;

/// Notices that modules or parameters were registered, replaced or taken away below a sharded module since it looked there
/// last. LibTorch tells nobody of that. It keeps no module alive.
class TreeWatch {
 public:
  /// modules: those whose parameters the sharded module manages, from its units downwards.
  void look(std::span<const WalkedModule> modules);
  /// For each step: compares counts and addresses, some ten instructions a module. False before the first look.
  bool has_changed() const;
  /// It was there at the last look.
  bool knows(const torch::nn::Module& module) const;
  /// The sharded modules themselves, in the order given to fully_shard; none if one of them is gone.
  std::vector<torch::nn::Module*> units() const;

 private:
  struct Known {
    torch::nn::Module* module;
    std::weak_ptr<torch::nn::Module> alive;
    bool is_shared;  ///< false: no shared_ptr owns the module
    bool is_unit;
    size_t parameters;   ///< entries of its table
    size_t children_end;  ///< in `children_`, behind its own
    bool is_gone() const { return is_shared && alive.expired(); }
  };

  struct Child {
    const torch::nn::Module* module;  ///< only compared
    std::weak_ptr<const torch::nn::Module> keeps_address;  ///< no other module comes there while this is known
  };

  std::vector<Known> known_;
  std::vector<Child> children_;  // of all of them, in order
};

}  // namespace fsdp
