#include "param/shared_autograd.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <typeinfo>
#include <utility>

#include "dtensor/dtensor_impl.hpp"
#include "param/replace_tensor.hpp"

namespace fsdp {

namespace {

using torch::autograd::AutogradMeta;
using Shared = std::shared_ptr<SharedAutograd>;

/// Metadata of the DTensor and of the unsharded tensor, which ask what they have in common.
class JointMeta : public AutogradMeta {
 public:
  JointMeta(Shared shared, SharedAutograd::Side side, const c10::TensorImpl* tensor)
      : shared_(std::move(shared)), side_(side), tensor_(tensor) {}
  ~JointMeta() override { shared_->set_meta(side_, nullptr); }

  bool requires_grad() const override { return shared_->requires_grad() || grad_fn_; }
  SharedAutograd& shared() const { return *shared_; }
  const c10::TensorImpl* tensor() const { return tensor_; }

 private:
  Shared shared_;
  SharedAutograd::Side side_;
  const c10::TensorImpl* tensor_;  // whose this is
};

class DTensorMeta final : public JointMeta {
 public:
  DTensorMeta(Shared shared, const c10::TensorImpl* tensor)
      : JointMeta(std::move(shared), SharedAutograd::Side::kDTensor, tensor) {}

  at::Tensor& mutable_grad() override { return shared().dtensor_grad(); }
  const at::Tensor& grad() const override { return shared().dtensor_grad(); }
  void lead_to(SharedAutograd::NodePtr node) {
    grad_accumulator_ = AccumulatorHooks::Weak(node);
    led_to_.reset();
    if (node.use_count() == 1) led_to_ = std::move(node);
  }

 private:
  // Autograd's own reference is a weak one, until there is an edge. Of a node that somebody has it goes with that one: so do
  // its hooks.
  SharedAutograd::NodePtr led_to_;
};

class UnshardedMeta final : public JointMeta {
 public:
  UnshardedMeta(Shared shared, const c10::TensorImpl* tensor)
      : JointMeta(std::move(shared), SharedAutograd::Side::kUnsharded, tensor) {}

  at::Tensor& mutable_grad() override { return is_accumulating() ? grad_ : shared().dtensor_grad(); }
  const at::Tensor& grad() const override { return is_accumulating() ? grad_ : shared().dtensor_grad(); }
  at::Tensor& accumulated() { return grad_; }

 private:
  /// Autograd itself asks, while it adds to the unsharded tensor's gradient, and hooks behind that. Or the tensor is set aside.
  bool is_accumulating() const {
    if (shared().is_set_aside()) return true;
    const auto node = torch::autograd::get_current_node();
    const torch::autograd::Node* current = node.get();
    if (current == nullptr || typeid(*current) != typeid(torch::autograd::AccumulateGrad)) return false;
    if (static_cast<const torch::autograd::AccumulateGrad&>(*current).variable.unsafeGetTensorImpl() != tensor()) return false;
    if (!current->post_hooks().empty()) [[unlikely]]
      shared().defer_accumulator_hooks();
    return true;
  }
};

/// Metadata of the piece, whose gradient is the parameter's.
class PieceMeta final : public AutogradMeta {
 public:
  explicit PieceMeta(Shared shared) : shared_(std::move(shared)) {}
  at::Tensor& mutable_grad() override { return shared_->piece_grad(); }
  const at::Tensor& grad() const override { return shared_->piece_grad(); }

 private:
  Shared shared_;
};

/// Replaces the tensor's metadata, whose fields move.
template <class Meta>
Meta* replace_meta(const at::Tensor& tensor, std::unique_ptr<Meta> meta) {
  auto* made = meta.get();
  if (auto* known = torch::autograd::impl::get_autograd_meta(tensor)) move_autograd_fields(*known, *made);
  tensor.unsafeGetTensorImpl()->set_autograd_meta(std::move(meta));
  return made;
}

}  // namespace

void SharedAutograd::join(const at::Tensor& tensor, Side side) {
  auto* impl = tensor.unsafeGetTensorImpl();
  AutogradMeta* meta = nullptr;
  if (side == Side::kDTensor)
    meta = replace_meta(tensor, std::make_unique<DTensorMeta>(shared_from_this(), impl));
  else
    meta = replace_meta(tensor, std::make_unique<UnshardedMeta>(shared_from_this(), impl));
  meta->requires_grad_ = requires_grad_;
  sides_[static_cast<size_t>(side)] = meta;
}

void SharedAutograd::join_piece(const at::Tensor& local) {
  replace_meta(local, std::make_unique<PieceMeta>(shared_from_this()));
}

at::Tensor& SharedAutograd::dtensor_grad() {
  if (!has_piece_) return dtensor_grad_;
  has_piece_ = false;
  if (!piece_grad_.defined()) return dtensor_grad_;
  DTensorValue value{.spec = spec_, .local = std::move(piece_grad_)};
  if (auto known = known_.lock(); known.defined())
    if (const auto* dtensor = DTensorImpl::of(known.get()); dtensor != nullptr && dtensor->local().is_same(value.local))
      return dtensor_grad_ = at::Tensor(std::move(known));
  const bool is_placed = value.local.sizes() == c10::IntArrayRef(spec_->piece().sizes) && !value.local.is_sparse();
  if (!is_placed) return dtensor_grad_ = std::move(value.local);
  auto storage = gradient_storage_.fill(value);
  return dtensor_grad_ = make_dtensor(std::move(value), std::move(storage));
}

/// What the user has assigned may be of any kind: the whole, this rank's rows, a DTensor placed in another way. Of any other
/// sizes it is refused where gradients are added to it.
at::Tensor& SharedAutograd::piece_grad() {
  if (has_piece_) return piece_grad_;
  has_piece_ = true;
  piece_grad_ = std::exchange(dtensor_grad_, {});
  if (!piece_grad_.defined()) return piece_grad_;
  const at::NoGradGuard no_grad;
  const auto* dtensor = DTensorImpl::of(piece_grad_);
  if (dtensor != nullptr && dtensor->has_piece() && dtensor->spec().is_placed_as(*spec_)) {
    known_ = piece_grad_.getIntrusivePtr();
    piece_grad_ = at::Tensor(dtensor->local());
  } else if (dtensor != nullptr) {
    piece_grad_ = copy_part_of(*spec_, dtensor->whole("gradient"));
  } else if (piece_grad_.sizes() == c10::IntArrayRef(spec_->sizes()) && !piece_grad_.is_sparse()) {
    piece_grad_ = copy_part_of(*spec_, piece_grad_.detach());
  }
  return piece_grad_;
}

void SharedAutograd::toggle_requires_grad() {
  requires_grad_ = !requires_grad_;
  ++toggles_;
  for (auto* side : sides_)
    if (side != nullptr) side->requires_grad_ = requires_grad_;
}

void SharedAutograd::join_accumulators() {
  auto* unsharded = sides_[static_cast<size_t>(Side::kUnsharded)];
  auto* dtensor = sides_[static_cast<size_t>(Side::kDTensor)];
  if (unsharded == nullptr || dtensor == nullptr) return;
  accumulator_hooks();  // of one that this replaces
  dtensor->grad_accumulator_ = unsharded->grad_accumulator_;
}

void SharedAutograd::lead_to(NodePtr node) {
  auto* dtensor = static_cast<DTensorMeta*>(sides_[static_cast<size_t>(Side::kDTensor)]);
  if (dtensor == nullptr) return;
  accumulator_hooks();  // of one that this replaces
  dtensor->lead_to(std::move(node));
}

void SharedAutograd::lead_to_dtensor() {
  auto* unsharded = sides_[static_cast<size_t>(Side::kUnsharded)];
  auto* dtensor = sides_[static_cast<size_t>(Side::kDTensor)];
  if (unsharded == nullptr || dtensor == nullptr) return;
  if (dtensor->grad_accumulator_.lock() == unsharded->grad_accumulator_.lock()) dtensor->grad_accumulator_.reset();
}

AccumulatorHooks& SharedAutograd::accumulator_hooks() {
  if (const auto* dtensor = static_cast<const DTensorMeta*>(sides_[static_cast<size_t>(Side::kDTensor)]))
    accumulator_hooks_.note(*dtensor, dtensor->tensor());
  return accumulator_hooks_;
}

/// Whoever looks for hooks asks the DTensor's metadata whether there is an accumulator.
void SharedAutograd::defer_accumulator_hooks() {
  join_accumulators();
  if (const auto* unsharded = sides_[static_cast<size_t>(Side::kUnsharded)])
    accumulator_hooks_.defer(unsharded->grad_accumulator_);
}

namespace {

/// Finds the metadata by the address of its type's description: the type is this file's alone, so there is one. Names would be
/// compared letter by letter. Null for any other tensor.
UnshardedMeta* unsharded_meta(const c10::TensorImpl& tensor) {
  auto* meta = tensor.autograd_meta();
  return meta != nullptr && &typeid(*meta) == &typeid(UnshardedMeta) ? static_cast<UnshardedMeta*>(meta) : nullptr;
}

}  // namespace

bool see_requires_grad(const c10::TensorImpl& tensor) {
  const auto* meta = unsharded_meta(tensor);
  return meta != nullptr && meta->shared().see_requires_grad();
}

at::Tensor& accumulated_grad(c10::TensorImpl& unsharded) {
  auto* meta = unsharded_meta(unsharded);
  return meta == nullptr ? unsharded.mutable_grad() : meta->accumulated();
}

}  // namespace fsdp
