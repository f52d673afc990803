#pragma once

#include <torch/csrc/autograd/saved_variable.h>

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "api/recompute/replay_environment.hpp"
#include "api/recompute/saved_tensors.hpp"
#include "fsdp/activation_checkpoint_region.hpp"

namespace fsdp::detail {

/// One tensor that autograd saved within a checkpoint: empty, but between a recomputation and its
/// use.
struct SavedPlace {
  static constexpr int64_t kNever = -2;
  at::Tensor recomputed;
  int64_t version = 0;    ///< of `recomputed`, when it was saved
  int64_t task = kNever;  ///< the autograd task that it was last recomputed for
};

/// What a recomputed tensor must have in common with the saved one.
struct SavedMetadata {
  explicit SavedMetadata(const at::Tensor& tensor);
  bool operator==(const SavedMetadata&) const = default;
  std::string to_string() const;

  std::vector<int64_t> sizes;  ///< none for a nested tensor
  at::ScalarType dtype;
  c10::Device device;
};

/// An input of a checkpoint until its last recomputation. Within another checkpoint it is one of
/// the tensors saved there: not kept either, but recomputed.
class KeptInput {
 public:
  explicit KeptInput(const at::Tensor& tensor);
  /// For the function to run on again: the same values, no history.
  at::Tensor again() const;

 private:
  at::Tensor as_it_is_;  // what must keep its identity, or cannot be saved
  torch::autograd::SavedVariable saved_;
};

/// Note [Checkpoint frames]
/// Each call of `activation_checkpoint` has a frame, which takes what autograd saves in its forward: for each
/// tensor a place is noted, and the tensor dropped. The graph's nodes own their places and, through
/// them, the frame. The first node that asks for its tensor in a backward makes the frame run the
/// function again, which fills, in order, all places that are still owned; each is emptied as it is
/// used, and what that backward left is dropped when it ends. The next backward recomputes again.
///
/// Frames nest without knowing of each other: the inputs that an inner frame keeps are saved by
/// autograd's own means, and so are places of the outer one. While a frame recomputes it is the
/// only one that sees what is saved; inner checkpoints of the recomputed function make frames of
/// their own.
///
/// Thread-safe: the devices' threads may ask at once.
class CheckpointFrame final : public SavePacker,
                              public std::enable_shared_from_this<CheckpointFrame> {
 public:
  CheckpointFrame(const ActivationCheckpointOptions& options, const std::vector<at::Tensor>& inputs,
                  Again again);

  std::unique_ptr<torch::autograd::SavedVariableHooks> make_hooks() override;
  /// Autograd saves `tensor` in forward.
  std::shared_ptr<SavedPlace> note_saved(const at::Tensor& tensor);
  /// Autograd needs it: recomputes unless this backward has already.
  at::Tensor take(SavedPlace& place);

  void complete();
  /// Forward ended with an exception: lets go of everything.
  void abandon() noexcept;
  const std::string& name() const { return name_; }

 private:
  class Recomputation;
  class DropAtEndOfTask;
  struct SavedTensor {
    SavedMetadata metadata;
    std::optional<int64_t> parameter_version;  // if it is a parameter or a view of one
    std::weak_ptr<SavedPlace> place;           // expired: backward is through with it
  };
  enum class State { kInForward, kComplete, kAbandoned };

  void recompute(int64_t task, const SavedPlace& wanted);
  void drop_recomputed(int64_t task);
  void check_same(size_t position, const at::Tensor& recomputed) const;

  std::recursive_mutex mutex_;
  std::string name_;
  bool stops_early_;
  State state_ = State::kInForward;
  ReplayEnvironment environment_;
  std::vector<KeptInput> inputs_;
  Again again_;
  std::vector<SavedTensor> saved_;
};

}  // namespace fsdp::detail
