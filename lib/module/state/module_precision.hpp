#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <memory>
#include <optional>
#include <vector>

#include "fsdp/policy.hpp"
#include "module/state/owned_group.hpp"
#include "module/state/tree_position.hpp"

namespace fsdp {

/// A buffer in another dtype than its module gave it (MixedPrecisionPolicy::buffer_dtype).
struct CastBuffer {
  CastBuffer(const at::Tensor& tensor, at::ScalarType own) : buffer(tensor.getIntrusivePtr()), dtype(own) {}
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> buffer;
  at::ScalarType dtype;  ///< its own: what it is saved in
};

/// The dtypes that the modules of a state have their buffers in and compute in: the policy's, or, with
/// full_precision_in_eval and while they are in eval mode, their own.
class ModulePrecision {
 public:
  ModulePrecision(const MixedPrecisionPolicy& policy, const std::vector<Unit>& units);

  // --- buffers
  /// To the device, and in the policy's dtype. What is on meta stays there.
  void move_buffers(const std::vector<at::Tensor>& buffers, c10::Device device);
  const std::vector<CastBuffer>& cast_buffers() const { return cast_buffers_; }
  void set_cast_buffers(std::vector<CastBuffer> buffers) { cast_buffers_ = std::move(buffers); }
  /// They are to be saved in another dtype: what they are in now stays.
  void set_own_dtype(at::ScalarType dtype);

  // --- full_precision_in_eval
  bool follows_modes() const { return full_precision_in_eval_; }
  /// What the modules' modes ask for now.
  bool wants_own_dtype() const;
  /// The modules were in eval mode when the last step or read began.
  bool computes_in_own_dtype() const { return computes_in_own_dtype_; }
  /// Gives the groups and the buffers the dtypes that the modes ask for.
  void follow_modes(const std::vector<OwnedGroup>& groups);

 private:
  void follow_buffers() const;

  bool full_precision_in_eval_;
  bool computes_in_own_dtype_ = false;
  std::optional<at::ScalarType> buffer_dtype_;
  std::vector<std::weak_ptr<const torch::nn::Module>> modules_;
  std::vector<CastBuffer> cast_buffers_;
};

}  // namespace fsdp
