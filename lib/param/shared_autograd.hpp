#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/variable.h>

#include <array>
#include <memory>
#include <utility>

#include "dtensor/whole_storage.hpp"
#include "param/accumulator_hooks.hpp"
#include "tensor/dtensor_spec.hpp"

namespace fsdp {

/// Note [One parameter, three tensors]
/// A parameter that is registered as a DTensor has three: the unsharded tensor, which the module's member holds and autograd
/// records, the DTensor, which `parameters()` gives, and the piece inside that, which the runtime works with. To a user the
/// first two are one parameter: one gradient, a DTensor, and one requires_grad. So they have autograd metadata of a kind that
/// asks here instead of having fields of its own. The piece's gradient is the runtime's: an ordinary tensor, the piece of the
/// same gradient. A change on either side shows on the other when that is asked the next time. Once a user has asked, the
/// DTensor alone holds the memory: it goes as soon as he resets the gradient. The whole gradient of one rank, which autograd
/// accumulates on the unsharded tensor, is nobody's but the runtime's: `accumulated_grad`.

/// Holds what a parameter's tensors have in common. They keep it alive. Not thread-safe, like the tensors themselves.
class SharedAutograd : public std::enable_shared_from_this<SharedAutograd> {
 public:
  enum class Side { kUnsharded, kDTensor };

  SharedAutograd(DTensorSpec::Ptr spec, bool requires_grad)
      : spec_(std::move(spec)), known_(dtensor_grad_.getIntrusivePtr()), requires_grad_(requires_grad) {}

  /// Makes the tensor's gradient and requires_grad those of the parameter from now on. What else its metadata holds stays.
  void join(const at::Tensor& tensor, Side side);
  void join_piece(const at::Tensor& local);
  /// Sets the spec of the piece that it has now, under the name that it has now: gradients are wrapped so.
  void set_spec(DTensorSpec::Ptr spec) {
    spec_ = std::move(spec);
    gradient_storage_.forget();
  }

  /// Makes the piece of the next gradient on `base`'s memory, as raw_view does. One that is the piece of no DTensor any more is
  /// used again.
  at::Tensor piece_on(const at::Tensor& base, c10::IntArrayRef sizes, c10::IntArrayRef strides, int64_t offset) {
    return gradient_storage_.piece_on(base, sizes, strides, offset);
  }
  /// Return the gradient, as a DTensor and as its piece. Either reference is good until the other side is asked.
  at::Tensor& dtensor_grad();
  at::Tensor& piece_grad();
  /// Returns requires_grad of the parameter. LibTorch sets it as a field of a tensor's metadata, past every virtual function,
  /// and reads it through one: so whichever side differs from what was known has been changed.
  bool requires_grad() {
    for (const auto* side : sides_)
      if (side != nullptr && side->requires_grad_ != requires_grad_) [[unlikely]] {
        toggle_requires_grad();
        break;
      }
    return requires_grad_;
  }
  /// Asks for `requires_grad`, and returns whether it has been changed since this was asked last.
  bool see_requires_grad() {
    requires_grad();
    return toggles_ != 0 && std::exchange(toggles_, 0) != 0;
  }
  /// Gives the DTensor the unsharded tensor's accumulator, if there is one: what leads to the DTensor then leads there.
  void join_accumulators();
  using NodePtr = decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));
  /// Lets the DTensor's accumulator be `node`, as autograd is about to ask for it, to lead an edge there.
  void lead_to(NodePtr node);
  /// Lets edges lead to the DTensor itself again.
  void lead_to_dtensor();
  /// Returns the accumulators' hooks, after a look at what users have asked the DTensor for.
  AccumulatorHooks& accumulator_hooks();
  bool knows_accumulators() const { return accumulator_hooks_.knows_any(); }
  /// Sets the unsharded tensor aside while it shows the whole in memory of its own (fsdp::FullParameters): its gradient is its
  /// own, too.
  void set_aside(bool value) { is_set_aside_ = value; }
  bool is_set_aside() const { return is_set_aside_; }

  // For metadata.
  void set_meta(Side side, torch::autograd::AutogradMeta* meta) { sides_[static_cast<size_t>(side)] = meta; }
  void defer_accumulator_hooks();

 private:
  void toggle_requires_grad();

  DTensorSpec::Ptr spec_;
  KeptStorage gradient_storage_;
  at::Tensor dtensor_grad_, piece_grad_;  // one of them at a time: whoever drops it frees the memory
  bool has_piece_ = true;                 // it is the piece
  /// The DTensor around the piece, if somebody refers to it still: then it is that one again.
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> known_;
  bool requires_grad_, is_set_aside_ = false;
  int toggles_ = 0;  // since somebody asked
  std::array<torch::autograd::AutogradMeta*, 2> sides_ = {};
  AccumulatorHooks accumulator_hooks_;
};

/// Asks an unsharded tensor's SharedAutograd::see_requires_grad; false for any other tensor.
bool see_requires_grad(const c10::TensorImpl& tensor);

/// Returns what autograd has accumulated on an unsharded tensor: whole, of this rank, not reduced. If its parameter has no
/// DTensor, that is the tensor's gradient.
at::Tensor& accumulated_grad(c10::TensorImpl& unsharded);
inline at::Tensor& accumulated_grad(const at::Tensor& unsharded) { return accumulated_grad(*unsharded.unsafeGetTensorImpl()); }

}  // namespace fsdp
