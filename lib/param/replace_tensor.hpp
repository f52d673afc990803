#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/variable.h>

namespace fsdp {

/// Gives `tensor` the storage, sizes, dtype and device of `other`, as set_data does, from and to
/// the meta device too, which set_data refuses. Who holds `tensor` keeps it; its requires_grad,
/// hooks, gradient and version counter stay. A residency key on it is gone.
void replace_tensor(const at::Tensor& tensor, const at::Tensor& other);

/// Makes a leaf that autograd knows as a view of another tensor one no longer: gradients, hooks and whether it needs a gradient
/// stay, the other tensor is let go.
///
/// Autograd regards a view of a view as one of the first tensor. When a version moves it derives such
/// a view anew, from a tensor that no gradient leads to.
void forget_base(const at::Tensor& leaf);

/// Moves all that a leaf's metadata holds but its being a view: gradients, hooks, what it requires.
void move_autograd_fields(torch::autograd::AutogradMeta& from, torch::autograd::AutogradMeta& to);

}  // namespace fsdp
