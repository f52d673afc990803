#include "group/eval_precision.hpp"

#include <fmt/format.h>

#include "fsdp/error.hpp"

namespace fsdp {

void EvalPrecision::check(const std::string& group) const {
  if (!asks_ || asks_() == is_own_dtype_) return;
  throw StateError(fmt::format(
      "'{}' went from {} in the middle of a step, which full_precision_in_eval cannot follow. Run the "
      "backward of the last forward first, or reset_iter_state(); a forward without backward belongs "
      "under torch::NoGradGuard or fsdp::forward_scope",
      group, is_own_dtype_ ? "eval to training mode" : "training to eval mode"));
}

}  // namespace fsdp
