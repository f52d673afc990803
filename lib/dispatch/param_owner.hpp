#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace fsdp {

/// What an operator is about to do with the sharded parameters among its operands.
struct OperatorUse {
  /// Autograd is on and an operand needs a gradient.
  bool records_autograd = false;
  /// The first parameter among the operands, for messages.
  std::string_view param_name = {};
};

/// Who makes a parameter's unsharded storage readable: the group it belongs to.
///
/// `param` implements nothing of it and knows nothing more, so that storage and dispatcher stay
/// below the scheduler.
class ParamOwner : public std::enable_shared_from_this<ParamOwner> {
 public:
  static constexpr int64_t kNotReady = -2;

  virtual ~ParamOwner() = default;

  /// Makes every owner in `owners` (this one among them) readable together, for one operator.
  /// Called for every touch but those for which `is_ready` says yes. Throws what a gather throws.
  virtual void make_resident(std::span<ParamOwner* const> owners, const OperatorUse& use) = 0;

  /// Unsharded parameters take the dtype that their module's mode asks for, if no step is under way. Comes before every
  /// use where `follows_mode()`, those that only look at sizes or make views too, unless `is_ready`.
  virtual void follow_mode() = 0;

  /// What the user has changed of requires_grad of parameter `index` shows on its unsharded parameter and its sharded parameter
  /// alike when this returns, and in what the group expects, but in a backward. Comes before every operator that autograd may
  /// record, those that only make views too, while `may_have_toggled()`.
  virtual void take_over_requires_grad(size_t index) = 0;

  /// An operator has just written to the unsharded storage of parameter `index`.
  virtual void carry_write(size_t index) = 0;

  /// True inside a scope of the root, or a function of a user's (Note [Functions of a user's]): operators see unsharded
  /// parameters in place of sharded parameters.
  virtual bool is_in_scope() const = 0;

  /// An operator has just written to sharded parameter `index`; through `data()`, if its version is what it was.
  virtual void note_write(size_t index) = 0;

  /// The dtype of what operators on parameter `index` return, where it is not their own choice.
  /// Asked only where `casts_operands()`.
  virtual std::optional<at::ScalarType> output_dtype(size_t index) const = 0;

  virtual const std::string& param_name(size_t index) const = 0;

  /// The unsharded parameter of parameter `index`; undefined once its module is gone.
  virtual at::Tensor unsharded_param(size_t index) const = 0;
  /// What autograd is to record in the place of the DTensor: of its sizes, and leading to the unsharded parameter.
  virtual at::Tensor recorded_param(size_t index) const { return unsharded_param(index); }
  /// What modules hold of it, where that is a DTensor; it may be undefined.
  virtual at::Tensor sharded_param(size_t index) const = 0;
  /// The identity of what modules hold of it, in whichever form.
  virtual const at::TensorImpl* sharded_identity(size_t index) const = 0;

  /// The storage behind unsharded parameter `index` is being destroyed: the module, or its member, is gone.
  virtual void unsharded_storage_gone(size_t index) noexcept = 0;

  /// True if a touch in autograd task `task` (-1: forward) needs no attention: the group was the last one used in that task,
  /// on the current stream, and is still unsharded.
  bool is_ready(int64_t task) const {
    return ready_task_.load(std::memory_order_acquire) == task &&
           (ready_stream_.load(std::memory_order_relaxed) == kAnyStream || is_ready_on_current_stream());
  }

  /// True while no step is under way.
  bool is_between_steps() const { return time_.load(std::memory_order_acquire) == Time::kBetweenSteps; }

  /// True while requires_grad may have been changed on one of a parameter's tensors and not show on the other. Within a step
  /// that is so of tensors that do not share it: what autograd records of the others tells of a change by itself.
  bool may_have_toggled() const { return time_.load(std::memory_order_acquire) != Time::kInStep; }

  /// True if an operator that uses one of its parameters gets its other operands in their dtype.
  bool casts_operands() const { return casts_operands_; }
  bool follows_mode() const { return follows_mode_; }

 protected:
  void set_casts_operands(bool value) { casts_operands_ = value; }
  void set_follows_mode(bool value) { follows_mode_ = value; }
  /// stream: of the last use; none: the device has none.
  void set_ready(int64_t task, const std::optional<c10::Stream>& stream = {});
  /// A parameter's tensors have requires_grad each.
  void watch_requires_grad() { in_step_ = Time::kInWatchedStep; }
  void set_between_steps(bool value) { time_.store(value ? Time::kBetweenSteps : in_step_, std::memory_order_release); }

 private:
  enum class Time : uint8_t { kBetweenSteps, kInWatchedStep, kInStep };

  static constexpr c10::StreamId kAnyStream = -1;
  bool is_ready_on_current_stream() const;

  // Read by any thread that runs operators; OpenMP workers among them.
  std::atomic<int64_t> ready_task_{kNotReady};
  std::atomic<c10::StreamId> ready_stream_{kAnyStream};
  std::atomic<c10::Device> ready_device_{c10::Device(c10::kCPU)};  // the stream's
  std::atomic<Time> time_{Time::kBetweenSteps};
  Time in_step_ = Time::kInStep;                        // these before any unsharded parameter exists
  bool casts_operands_ = false, follows_mode_ = false;
};

}  // namespace fsdp
