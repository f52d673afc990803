#include "fsdp/activation_checkpoint_region.hpp"

#include "api/recompute/checkpoint_frame.hpp"
#include "base/require.hpp"
#include "fsdp/parameters.hpp"

namespace fsdp::detail {

class CheckpointRegion::Active {
 public:
  explicit Active(CheckpointFrame& frame) : packing_(frame) {}

 private:
  PackSavedTensors packing_;
};

namespace {

/// A parameter's version may move at its first use after a step.
std::optional<int64_t> watched_version(const at::Tensor& input) {
  if (!input.defined() || input.is_inference() || is_fsdp_parameter(input)) return std::nullopt;
  return static_cast<int64_t>(input._version());
}

}  // namespace

CheckpointRegion::CheckpointRegion(const ActivationCheckpointOptions& options, std::vector<at::Tensor> inputs,
                                   Again again)
    : frame_(std::make_shared<CheckpointFrame>(options, inputs, std::move(again))),
      active_(std::make_unique<Active>(*frame_)),
      inputs_(std::move(inputs)) {
  for (const auto& input : inputs_) versions_.push_back(watched_version(input));
}

CheckpointRegion::~CheckpointRegion() {
  active_.reset();
  // Its graph may live on in a tensor that the function has modified: it must keep nothing alive.
  if (!is_finished_) frame_->abandon();
}

void CheckpointRegion::finish() {
  active_.reset();
  for (size_t i = 0; i < inputs_.size(); ++i)
    require(!versions_[i] || versions_[i] == watched_version(inputs_[i]),
            "fsdp::activation_checkpoint of {}: the function modified tensor {} of its inputs in place, so "
            "that it "
            "cannot be run again on what it was; clone it first",
            frame_->name(), i + 1);
  frame_->complete();
  is_finished_ = true;
}

}  // namespace fsdp::detail
