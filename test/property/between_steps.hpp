#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "fsdp/testing/recording.hpp"
#include "property/byte_formula.hpp"
#include "property/grad_dtypes.hpp"
#include "property/value_writes.hpp"

namespace fsdp::test {

/// Whether a draw may freeze the parameter of this name.
bool may_be_frozen(const RandomTree& tree, const std::string& name);

/// What a program does between steps: it sets dtypes of gradients, freezes and thaws, evaluates, and writes. On the plain model
/// the same, as far as it leaves traces there.
class BetweenSteps {
 public:
  /// What a sharded model has beside.
  struct Sharded {
    CallLog& log;
    const std::vector<PlainGroup>& groups;
    OwnCollectives own_collectives;
  };
  using Evaluate = std::function<at::Tensor(int step)>;

  /// body: the part of the model of which some is frozen. evaluate: the loss of the model in eval mode.
  BetweenSteps(const RandomTree& tree, std::shared_ptr<torch::nn::Module> model,
               std::shared_ptr<torch::nn::Module> body, std::shared_ptr<GradDtypes> dtypes, Evaluate evaluate);

  /// Before step `step`. Returns what was evaluated, as far as the plain model's is the same.
  std::vector<at::Tensor> run(int step, const Sharded* sharded);

 private:
  /// Parameters that are frozen and thawed together.
  struct Toggle {
    By by;
    std::vector<std::string> names = {};
    std::vector<at::Tensor> members = {};
    std::vector<bool> is_trainable = {};  ///< by step
  };
  /// A forward without a backward.
  struct Evaluation {
    int64_t before = -1;           ///< this toggle, or behind them all; -1: there is none
    bool is_recorded = true;       ///< by autograd
    bool outlives_writes = false;  ///< its graph is there when parameters are written behind it
  };

  void draw_toggles();
  void draw_evaluations();
  void set_dtypes(int step, const Sharded* sharded);
  void set_trainable(const Toggle& toggle, int step, const Sharded* sharded) const;
  void write(int step, ValueWrites::Place place, const Sharded* sharded) const;

  RandomTree tree_;
  std::shared_ptr<torch::nn::Module> model_, body_;
  std::shared_ptr<GradDtypes> dtypes_;
  Evaluate evaluate_;
  ValueWrites writes_;
  std::vector<Toggle> toggles_;
  std::vector<Evaluation> evaluations_;  // by step
  bool is_comparable_;                   // what is evaluated
};

}  // namespace fsdp::test
