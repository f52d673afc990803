#include "group/reduce/dense_gradient.hpp"

#include <ATen/ATen.h>

namespace fsdp {

at::Tensor dense_gradient(at::Tensor gradient) {
  if (!gradient.defined()) return gradient;
  if (gradient.layout() != at::kStrided) gradient = gradient.to_dense();
  // Asked first: the operators cost a thousand instructions even where there is nothing to do.
  if (gradient.is_conj() || gradient.is_neg()) gradient = gradient.resolve_conj().resolve_neg();
  return gradient;
}

}  // namespace fsdp
