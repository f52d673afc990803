#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "api/state_dict/optimizer_plan.hpp"
#include "fsdp/checkpoint_parts.hpp"

// An optimizer in a checkpoint: the section "optimizer" has its tensors as "PARAMETER.FIELD", step counters among them;
// optimizer.json has its class and the options and parameters of its groups.
namespace fsdp {

inline constexpr auto kOptimizerFile = "optimizer.json";

/// Throws UsageError for a class or state that is not known.
CheckpointSection optimizer_section(const std::vector<OptimizerParam>& params, const torch::optim::Optimizer& optimizer);
std::string optimizer_document(const std::vector<OptimizerParam>& params, const torch::optim::Optimizer& optimizer);
/// Stages of a pipeline have optimizers of their own, with other parameters: the ranks' documents in one, the first that
/// names a parameter winning. Empty: a rank has none. Throws UsageError where classes or numbers of groups differ.
std::string merge_optimizer_documents(const std::vector<std::string>& texts);

/// An optimizer that is loaded: first what it needs from the checkpoint, then, with that in place, the change itself.
class OptimizerLoad {
 public:
  struct SavedSection {
    std::optional<std::string> document;                                   // optimizer.json
    std::map<std::string, CheckpointReader::TensorInfo> tensors = {};  // of the section
  };

  /// Changes nothing. optimizer: outlives this.
  OptimizerLoad(std::vector<OptimizerParam> params, torch::optim::Optimizer& optimizer, const SavedSection& saved,
                const LoadCheckpointOptions& options);
  OptimizerLoad(const OptimizerLoad&) = delete;
  OptimizerLoad& operator=(const OptimizerLoad&) = delete;

  /// What is to be loaded: all or none of a parameter's state, unless `strict` is set, when all has to fit.
  const CheckpointSection& section() const { return section_; }
  /// False: it is another optimizer's, or none, and nothing of it can be loaded.
  bool is_planned() const { return plan_ && !plan_->decisions().is_refused && !params_.empty(); }
  const IncompatibleKeys& misfits() const { return plan_ ? plan_->misfits() : without_document_; }
  /// The section's tensors have been loaded: gives them to the optimizer, with the groups' options.
  void finish();

 private:
  struct MadeState {
    std::unique_ptr<torch::optim::OptimizerParamState> state;
    at::Tensor step;
  };

  bool take(size_t position, const std::string& name, const SavedSection& saved, IncompatibleKeys& misfits);
  bool fits(const CheckpointTensor& tensor, const SavedSection& saved, IncompatibleKeys& misfits) const;

  std::vector<OptimizerParam> params_;
  torch::optim::Optimizer& optimizer_;
  std::string class_;
  bool is_strict_, converts_;
  std::vector<MadeState> made_;  // by position
  CheckpointSection section_{"optimizer", {}};
  std::optional<OptimizerPlan> plan_;  // none: there is no document
  IncompatibleKeys without_document_;
};

}  // namespace fsdp
