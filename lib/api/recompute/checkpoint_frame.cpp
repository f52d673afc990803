#include "api/recompute/checkpoint_frame.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include "base/require.hpp"
#include "dispatch/recomputation.hpp"
#include "fsdp/parameters.hpp"

namespace fsdp::detail {

namespace {

// Ends a recomputation. No std::exception, so that a function's own handlers let it pass.
struct RecomputedEnough {};

using torch::autograd::SavedVariableHooks;

/// In forward: drops the tensor.
class InForward final : public SavedVariableHooks {
 public:
  explicit InForward(std::shared_ptr<CheckpointFrame> frame) : frame_(std::move(frame)) {}
  void call_pack_hook(const at::Tensor& tensor) override { place_ = frame_->note_saved(tensor); }
  at::Tensor call_unpack_hook() override { return frame_->take(*place_); }

 private:
  std::shared_ptr<CheckpointFrame> frame_;
  std::shared_ptr<SavedPlace> place_;
};

/// The version of a parameter that `tensor` is, or is a view of.
std::optional<int64_t> parameter_version(const at::Tensor& tensor) {
  const auto base = tensor.is_view() ? tensor._base() : tensor;
  if (!base.is_leaf() || !base.requires_grad()) return std::nullopt;
  return tensor._version();
}

std::string name_of(const ActivationCheckpointOptions& options, const torch::nn::Module* module) {
  if (!options.name.empty()) return options.name;
  return module != nullptr ? module->name() : "a function";
}

}  // namespace

SavedMetadata::SavedMetadata(const at::Tensor& tensor)
    : dtype(tensor.scalar_type()), device(tensor.device()) {
  if (!tensor.is_nested()) sizes = tensor.sizes().vec();
}

std::string SavedMetadata::to_string() const {
  return fmt::format("{} [{}] on {}", c10::toString(dtype), fmt::join(sizes, ", "), device.str());
}

KeptInput::KeptInput(const at::Tensor& tensor) {
  if (!tensor.defined()) return;
  // A sharded parameter stands for its unsharded parameter as itself only.
  if (tensor.is_inference() || is_fsdp_parameter(tensor))
    as_it_is_ = tensor;
  else
    saved_ = torch::autograd::SavedVariable(tensor, /*is_output=*/false);
}

at::Tensor KeptInput::again() const {
  if (as_it_is_.defined()) return as_it_is_;
  const auto tensor = saved_.unpack();
  if (!tensor.defined() || tensor.is_leaf()) return tensor;
  return tensor.detach().requires_grad_(tensor.requires_grad());
}

/// Fills the places of a frame as the function runs again.
class CheckpointFrame::Recomputation final : public SavePacker {
 public:
  Recomputation(CheckpointFrame& frame, int64_t task, const SavedPlace& wanted)
      : frame_(frame), task_(task), wanted_(wanted) {
    for (size_t i = 0; i < frame_.saved_.size(); ++i)
      if (needed(i)) last_ = i;
  }

  std::unique_ptr<SavedVariableHooks> make_hooks() override {
    return std::make_unique<Kept>(*this);
  }

  void check_count() const {
    const size_t saved = frame_.saved_.size();
    const bool is_judged = frame_.state_ == State::kComplete && !has_stopped_;
    require(!is_judged || next_ == saved,
            "fsdp::activation_checkpoint of {}: forward saved {} tensors for backward, its recomputation {}; "
            "the function must do the same each time (no dependence on state that it changes, on "
            "random numbers of generators that checkpoint does not know, or on the grad mode)",
            frame_.name_, saved, next_);
  }

 private:
  /// What the function saves it also keeps, for a backward that it may run itself.
  class Kept final : public SavedVariableHooks {
   public:
    explicit Kept(Recomputation& recomputation) : recomputation_(recomputation) {}
    void call_pack_hook(const at::Tensor& tensor) override {
      tensor_ = tensor.tensor_data();
      recomputation_.note_saved(tensor);
    }
    at::Tensor call_unpack_hook() override { return tensor_; }

   private:
    Recomputation& recomputation_;  // used at once only
    at::Tensor tensor_;
  };

  std::shared_ptr<SavedPlace> needed(size_t position) const {
    auto place = frame_.saved_[position].place.lock();
    const bool is_new = place && (place->task != task_ || place.get() == &wanted_);
    return is_new ? place : nullptr;
  }

  void note_saved(const at::Tensor& tensor) {
    const size_t position = next_++;
    if (position >= frame_.saved_.size()) return;  // too many: counted
    frame_.check_same(position, tensor);
    if (const auto place = needed(position)) {
      place->recomputed = tensor.tensor_data();
      place->version = static_cast<int64_t>(tensor._version());
      place->task = task_;
    }
    if (!frame_.stops_early_ || position < last_) return;
    has_stopped_ = true;
    throw RecomputedEnough();
  }

  CheckpointFrame& frame_;
  const int64_t task_;
  const SavedPlace& wanted_;
  size_t next_ = 0, last_ = 0;
  bool has_stopped_ = false;
};

/// Held by an autograd task: dies with it, however it ends.
class CheckpointFrame::DropAtEndOfTask {
 public:
  DropAtEndOfTask(std::weak_ptr<CheckpointFrame> frame, int64_t task)
      : frame_(std::move(frame)), task_(task) {}
  ~DropAtEndOfTask() {
    if (const auto frame = frame_.lock()) frame->drop_recomputed(task_);
  }

 private:
  std::weak_ptr<CheckpointFrame> frame_;
  int64_t task_;
};

CheckpointFrame::CheckpointFrame(const ActivationCheckpointOptions& options,
                                 const std::vector<at::Tensor>& inputs, Again again)
    : name_(name_of(options, again.module)),
      stops_early_(options.early_stop),
      environment_(options, again.module),
      again_(std::move(again)) {
  for (const auto& input : inputs) inputs_.emplace_back(input);
}

std::unique_ptr<SavedVariableHooks> CheckpointFrame::make_hooks() {
  return std::make_unique<InForward>(shared_from_this());
}

std::shared_ptr<SavedPlace> CheckpointFrame::note_saved(const at::Tensor& tensor) {
  std::lock_guard lock(mutex_);
  auto place = std::make_shared<SavedPlace>();
  saved_.push_back({SavedMetadata(tensor), parameter_version(tensor), place});
  return place;
}

void CheckpointFrame::complete() {
  std::lock_guard lock(mutex_);
  environment_.end_of_forward();
  state_ = State::kComplete;
}

void CheckpointFrame::abandon() noexcept {
  std::lock_guard lock(mutex_);
  state_ = State::kAbandoned;
  inputs_.clear();
  again_ = {};
}

at::Tensor CheckpointFrame::take(SavedPlace& place) {
  std::lock_guard lock(mutex_);
  const int64_t task = torch::autograd::get_current_graph_task_id();
  if (place.task != task || !place.recomputed.defined()) recompute(task, place);
  const auto tensor = std::exchange(place.recomputed, {});
  if (task == -1) drop_recomputed(task);  // no task whose end would
  require(
      tensor.defined(),
      "fsdp::activation_checkpoint of {}: its recomputation ended before it had saved all that forward did; "
      "the function must do the same each time",
      name_);
  require_state(static_cast<int64_t>(tensor._version()) == place.version,
                "fsdp::activation_checkpoint of {}: a tensor [{}] that backward needs was modified in place "
                "after it had been saved; use an operator that is not in place",
                name_, fmt::join(tensor.sizes(), ", "));
  return tensor;
}

void CheckpointFrame::recompute(int64_t task, const SavedPlace& wanted) {
  require_state(
      state_ != State::kAbandoned,
      "fsdp::activation_checkpoint of {}: its forward ended with an exception, so there is nothing to "
      "recompute; run forward again",
      name_);
  std::vector<at::Tensor> inputs;
  for (const auto& input : inputs_) inputs.push_back(input.again());
  if (task != -1) {
    auto end = std::make_shared<DropAtEndOfTask>(weak_from_this(), task);
    torch::autograd::Engine::get_default_engine().queue_callback([end] {});
  }
  Recomputation recomputation(*this, task, wanted);
  {
    ReplayEnvironment::Restored environment(environment_);
    RecomputationGuard as_forward(task);
    PackSavedTensors packing(recomputation);
    try {
      again_.run(inputs);
    } catch (const RecomputedEnough&) {
    }
  }
  recomputation.check_count();
}

void CheckpointFrame::drop_recomputed(int64_t task) {
  std::lock_guard lock(mutex_);
  for (auto& saved : saved_)
    if (const auto place = saved.place.lock(); place && place->task == task)
      place->recomputed.reset();
}

void CheckpointFrame::check_same(size_t position, const at::Tensor& recomputed) const {
  const auto& saved = saved_[position];
  const SavedMetadata found(recomputed);
  require(
      found == saved.metadata,
      "fsdp::activation_checkpoint of {}: tensor {} of {} that forward saved was {}, recomputed it is {}; the "
      "function must do the same each time",
      name_, position + 1, saved_.size(), saved.metadata.to_string(), found.to_string());
  require_state(
      !saved.parameter_version || saved.parameter_version == parameter_version(recomputed),
      "fsdp::activation_checkpoint of {}: a parameter [{}] was written between forward and backward, so "
      "that its recomputation would not be what forward computed; step the optimizer after "
      "backward",
      name_, fmt::join(found.sizes, ", "));
}

}  // namespace fsdp::detail
