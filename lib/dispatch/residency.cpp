#include "dispatch/residency.hpp"

#include "dispatch/residency_fallback.hpp"

namespace fsdp {

void add_inner_residency_key(const at::Tensor& alias) {
  make_inner_fallback_known();
  add_key(alias, kInnerResidencyKey);
}

}  // namespace fsdp
