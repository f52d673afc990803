#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "fsdp/activation_checkpoint_region.hpp"

namespace fsdp {

class ForwardScope;
class ModuleState;

/// The states of random number generators at one moment.
class GeneratorStates {
 public:
  GeneratorStates() = default;
  explicit GeneratorStates(std::vector<at::Generator> generators);

  const std::vector<at::Generator>& generators() const { return generators_; }
  void restore() const;
  /// Forgets the generators that have drawn nothing since.
  void drop_unchanged();

 private:
  std::vector<at::Generator> generators_;
  std::vector<at::Tensor> states_;
};

/// Autocast of one thread.
class AutocastState {
 public:
  /// As it is now.
  AutocastState();
  void restore() const;

 private:
  struct OfDevice {
    at::DeviceType type;
    bool enabled;
    at::ScalarType dtype;
  };
  std::vector<OfDevice> devices_;
  bool caches_;
};

/// What a function's results depend on besides its inputs, as it was when the object was made.
class ReplayEnvironment {
 public:
  ReplayEnvironment(const ActivationCheckpointOptions& options, const torch::nn::Module* module);

  /// The function has returned.
  void end_of_forward() { generators_.drop_unchanged(); }

  /// While it lives, this thread is as it was then; afterwards as it was before, and what the
  /// function updated on the way (generators, running statistics) as well.
  class Restored {
   public:
    explicit Restored(const ReplayEnvironment& environment);
    ~Restored();
    Restored(const Restored&) = delete;
    Restored& operator=(const Restored&) = delete;

   private:
    AutocastState autocast_;
    GeneratorStates generators_;
    std::vector<std::pair<at::Tensor, at::Tensor>> buffers_;  // and their values
    std::vector<std::unique_ptr<ForwardScope>> scopes_;
    at::AutoGradMode grad_mode_{true};
  };

 private:
  GeneratorStates generators_;
  AutocastState autocast_;
  std::vector<at::Tensor> buffers_;
  const torch::nn::Module* module_;
  std::vector<std::weak_ptr<ModuleState>> scopes_;  // open then: see forward_scope.hpp
};

}  // namespace fsdp
