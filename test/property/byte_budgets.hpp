#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "property/byte_formula.hpp"
#include "property/operands_at_once.hpp"
#include "property/random_tree.hpp"

namespace fsdp::test {

/// Byte budgets of one rank's model: sets those that are drawn, and checks what is promised of each.
class ByteBudgets {
 public:
  /// hooked: parameters that users' gradient hooks read whole.
  ByteBudgets(const Rank& rank, const torch::nn::Module& model, std::shared_ptr<const std::vector<PlainGroup>> groups,
              const RandomTree& tree, const std::vector<at::Tensor>& hooked);

  /// Of the library, as they begin: what gathers and releases.
  void note_range(std::string_view name);
  /// Checks what was held with each gather since the last call: no more than the budget, or than what one operator reads.
  void check(const std::string& when);
  /// Between steps: another budget, maybe one that is too small.
  void draw_next();
  /// A forward. If the budget is too small for it, once more with what is missing: buffers are what they were before.
  at::Tensor forward(const std::function<at::Tensor()>& run);
  /// Always the same: a forward, whose backward follows, and what drops gradients.
  struct Step {
    std::function<at::Tensor()> forward;
    std::function<void()> end;
  };
  /// After all steps. Under budgets from the smallest on, what is gathered is what the outlook says, and does not rise.
  void check_outlook(const Step& step);

 private:
  int64_t find_least();
  void follow_operators();
  void check_refused(const std::string& message, int64_t unsharded_before);
  void check_row(const BudgetOutlook& row, const std::function<void()>& run_step, int64_t& gathered_before);

  const Rank& rank_;
  std::shared_ptr<const std::vector<PlainGroup>> groups_;
  std::vector<FSDPModule> roots_;
  std::vector<at::Tensor> buffers_;
  OperandsAtOnce at_once_;
  bool is_drawn_;
  Draw draw_;
  std::map<std::string, int64_t, std::less<>> bytes_by_name_;  // of groups
  int64_t held_ = 0, most_held_ = 0;  // now; when something was gathered, since the last check
  int64_t read_by_hook_ = 0;        ///< bytes of the largest group that one reads
  int64_t least_ = 0, all_ = 0;
};

}  // namespace fsdp::test
