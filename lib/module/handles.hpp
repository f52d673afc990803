#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "fsdp/async_handles.hpp"
#include "fsdp/fsdp_module.hpp"

namespace fsdp {

// Inner classes, which may use what is private. Programs know their names alone.
class FSDPModule::Inner {
 public:
  static FSDPModule make(std::shared_ptr<ModuleState> state) { return FSDPModule(std::move(state)); }
  static const std::shared_ptr<ModuleState>& state(const FSDPModule& module) { return module.state_; }
};
class UnshardHandle::Inner {
 public:
  static UnshardHandle make(std::shared_ptr<ModuleState> state) { return UnshardHandle(std::move(state)); }
};
class GradientReductionHandle::Inner {
 public:
  static GradientReductionHandle make(std::shared_ptr<ModuleState> root, int64_t ticket) {
    return GradientReductionHandle(std::move(root), ticket);
  }
};

/// The way between a program's handles and the library's state of a module.
namespace handles {

inline FSDPModule module(std::shared_ptr<ModuleState> state) { return FSDPModule::Inner::make(std::move(state)); }
inline UnshardHandle unshard(std::shared_ptr<ModuleState> state) { return UnshardHandle::Inner::make(std::move(state)); }
inline GradientReductionHandle reduction(std::shared_ptr<ModuleState> root, int64_t ticket) {
  return GradientReductionHandle::Inner::make(std::move(root), ticket);
}

inline const std::shared_ptr<ModuleState>& shared_state(const FSDPModule& module) {
  return FSDPModule::Inner::state(module);
}
inline ModuleState& state(const FSDPModule& module) { return *shared_state(module); }

}  // namespace handles

}  // namespace fsdp
