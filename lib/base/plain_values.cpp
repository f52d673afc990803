#include "base/plain_values.hpp"

#include <ATen/ATen.h>

#include <c10/util/StringUtil.h>

namespace fsdp {

at::Tensor plain_values(at::Tensor tensor) {
  if (!tensor.defined() || is_plain(tensor)) return tensor;
  const bool is_subclass = tensor.key_set().has(c10::DispatchKey::Python);
  if (!is_subclass && tensor.layout() != at::kStrided) tensor = tensor.to_dense();
  if (!is_subclass && (tensor.is_conj() || tensor.is_neg())) tensor = tensor.resolve_conj().resolve_neg();
  if (is_plain(tensor)) return tensor;
  const at::NoGradGuard no_grad;
  auto values = at::empty(tensor.sizes(), at::TensorOptions().dtype(tensor.dtype()).device(tensor.device()));
  values.copy_(tensor);
  return values;
}

std::string what_it_is(const at::Tensor& tensor) {
  const auto keys = tensor.key_set();
  if (keys.has(c10::DispatchKey::Python)) return "a tensor subclass of Python's";
  if (keys.has_any(c10::DispatchKeySet({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative})))
    return "a lazy view of another's memory (conj, neg)";
  if (keys.has(c10::DispatchKey::ZeroTensor)) return "a zero without memory";
  if (keys.has_any(c10::DispatchKeySet({c10::DispatchKey::Functionalize, c10::DispatchKey::FuncTorchBatched,
                                        c10::DispatchKey::FuncTorchGradWrapper})))
    return "a tensor that a transform wraps";
  return c10::str("a tensor of layout ", tensor.layout());
}

}  // namespace fsdp
