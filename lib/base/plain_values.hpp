#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace fsdp {

// Note [Plain tensors]
// Much here reads a tensor's memory past the dispatcher, which is right only where that memory holds the values. A tensor
// subclass of Python's may have none, a sparse one holds indices, and what torch.func wraps, or a lazy view (conj, neg, zero)
// leaves something to be done. So a user's tensor is looked at where it enters: what is not plain is refused by name, or its
// values are taken by an operator, which any of them knows.

/// Keys of tensors whose memory does not hold their values.
inline constexpr c10::DispatchKeySet kNotPlain({
    c10::DispatchKey::Python,
    c10::DispatchKey::Sparse,
    c10::DispatchKey::SparseCsr,
    c10::DispatchKey::NestedTensor,
    c10::DispatchKey::MkldnnCPU,
    c10::DispatchKey::Conjugate,
    c10::DispatchKey::Negative,
    c10::DispatchKey::ZeroTensor,
    c10::DispatchKey::Functionalize,
    c10::DispatchKey::FuncTorchBatched,
    c10::DispatchKey::FuncTorchGradWrapper,
});

/// True if the tensor's memory holds its values, as sizes and strides say; false if it is undefined.
inline bool is_plain(const c10::TensorImpl& tensor) {
  constexpr c10::DispatchKeySet dense(c10::DispatchKey::Dense);
  return (tensor.key_set() & (kNotPlain | dense)) == dense;
}
inline bool is_plain(const at::Tensor& tensor) { return is_plain(*tensor.unsafeGetTensorImpl()); }

/// The values as a plain tensor: the tensor itself where it is one, or is undefined. What a subclass's operator raises is
/// passed on.
at::Tensor plain_values(at::Tensor tensor);

/// Names, for messages, what kind of tensor one is that is not plain: "a tensor subclass of Python's", say.
std::string what_it_is(const at::Tensor& tensor);

}  // namespace fsdp
