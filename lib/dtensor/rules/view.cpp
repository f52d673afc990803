#include <ATen/ATen.h>

#include "base/require.hpp"
#include "dtensor/rules/propagate.hpp"

// Views. Where a view lies in the whole's memory is found by running it on a meta tensor. It has a piece if every cut
// dimension is one of its dimensions, unchanged, or, of a flat layout, which cuts no dimension, if it shows all as it is; any
// other is a window.
namespace fsdp {

namespace {

/// Note [Dimensions of a view]
/// Which dimensions of a tensor the dimensions of its view are made of: the operator runs on a meta tensor whose strides are
/// powers of one large number. Each stride of the result, and its offset, is then a sum of these with small factors, which are
/// read off like digits. What needs other strides (`view` that joins dimensions) fails on it, and is a window.
class ViewedDims {
 public:
  static constexpr int kBits = 60;

  explicit ViewedDims(const DTensorImpl& dtensor) : ndim_(dtensor.dim()) {
    bits_ = ndim_ > 0 ? kBits / static_cast<int>(ndim_) : kBits;
    for (int64_t dim = 0; dim < ndim_; ++dim) {
      is_usable_ &= dtensor.size(dim) < (int64_t{1} << (bits_ - 2));
      strides_.push_back(int64_t{1} << (bits_ * (ndim_ - 1 - dim)));
    }
  }

  /// False: there are too many dimensions, or too large ones.
  bool is_usable() const { return is_usable_ && ndim_ > 0 && bits_ > 2; }
  c10::IntArrayRef strides() const { return strides_; }

  /// Returns the number that the same sum gives with `strides` in the place of these; none if it is no such sum.
  std::optional<int64_t> with_strides(int64_t number, c10::IntArrayRef strides) const {
    int64_t sum = 0;
    for (int64_t dim = 0; dim < ndim_; ++dim) {
      const auto at = static_cast<size_t>(dim);
      sum += number / strides_[at] * strides[at];
      number %= strides_[at];
    }
    return number == 0 ? std::optional(sum) : std::nullopt;
  }
  /// Returns how often the stride of `dim` is in the number.
  int64_t factor(int64_t number, int64_t dim) const {
    for (int64_t before = 0; before < dim; ++before) number %= strides_[static_cast<size_t>(before)];
    return number / strides_[static_cast<size_t>(dim)];
  }

 private:
  int64_t ndim_;
  int bits_ = kBits;
  bool is_usable_ = true;
  std::vector<int64_t> strides_;
};

/// The view's dimension that is `dim` as it was; none: the view changes it.
std::optional<int64_t> kept_as(const ViewedDims& dims, const at::Tensor& shown, int64_t dim, int64_t size) {
  if (dims.factor(shown.storage_offset(), dim) != 0) return std::nullopt;
  std::optional<int64_t> found;
  for (int64_t i = 0; i < shown.dim(); ++i) {
    const auto factor = dims.factor(shown.stride(i), dim);
    if (factor == 0) continue;
    const bool is_it =
        factor == 1 && !found && shown.size(i) == size && shown.stride(i) == dims.strides()[static_cast<size_t>(dim)];
    if (!is_it) return std::nullopt;
    found = i;
  }
  return found;
}

class ViewCall {
 public:
  ViewCall(const OperatorCall& call, const DTensorImpl& viewed, at::Tensor self)
      : call_(call), viewed_(viewed), base_(viewed.base().defined() ? viewed.base() : shown_by_views(std::move(self))) {}

  void run() const {
    const auto elements = at::empty({DTensorImpl::of(base_)->numel()}, meta_options());
    auto geometry = call_.call(arguments_on(elements.as_strided(viewed_.sizes(), viewed_.strides(), viewed_.storage_offset())));
    bool is_view = true, keeps_dtype = true;
    for (const auto& value : geometry)
      for_tensors(value, [&](const at::Tensor& tensor, int64_t) {
        is_view &= tensor.is_alias_of(elements);
        keeps_dtype &= tensor.scalar_type() == elements.scalar_type();
      });
    if (!is_view) return run_general(call_);
    require(keeps_dtype, "{}: cannot view a sharded tensor as another dtype; take fsdp::full_tensor(tensor) first",
            call_.op().schema().name());
    const auto shown = shown_dims();
    size_t result = 0;
    std::vector<at::Tensor> views;
    for (const auto& value : geometry)
      for_tensors(value, [&](const at::Tensor& tensor, int64_t) {
        views.push_back(view_of(tensor, result < shown.size() ? shown[result] : at::Tensor()));
        ++result;
      });
    size_t next = 0;
    for (auto& value : geometry)
      replace_tensors(value, [&](const at::Tensor&, int64_t) { return views[next++]; });
    call_.give_results(std::move(geometry), [](const at::Tensor&, int64_t) { return at::Tensor(); });
  }

 private:
  /// set_data gives a parameter other memory, which is not its views'.
  static at::Tensor shown_by_views(at::Tensor self) {
    const auto* impl = DTensorImpl::of(self);
    if (!impl->keeps_memory()) return self;
    return at::Tensor(impl->shallow_copy_and_detach(impl->version_counter(), /*allow_tensor_metadata_change=*/true));
  }

  at::TensorOptions meta_options() const { return at::TensorOptions().dtype(viewed_.dtype()).device(at::kMeta); }

  OperatorCall::Arguments arguments_on(const at::Tensor& self) const {
    auto arguments = call_.arguments();
    arguments[0] = self;
    for (size_t i = 1; i < call_.count(); ++i)
      replace_tensors(arguments[i], [](const at::Tensor& other, int64_t) {
        const auto* dtensor = DTensorImpl::of(other);  // whose sizes alone count: view_as
        return dtensor == nullptr ? at::Tensor()
                                  : at::empty_strided(dtensor->sizes(), dtensor->strides(),
                                                      at::TensorOptions().dtype(dtensor->dtype()).device(at::kMeta));
      });
    return arguments;
  }

  /// The results on a tensor with telling strides; empty: there is none, or the operator cannot run on it.
  std::vector<at::Tensor> shown_dims() const {
    std::vector<at::Tensor> shown;
    const ViewedDims dims(viewed_);
    // Of a flat layout a piece has one dimension, which is none of the tensor's.
    if (!viewed_.has_piece() || viewed_.spec().is_flat() || !dims.is_usable() || call_.name() == "as_strided") return shown;
    try {
      auto telling = at::empty_strided(viewed_.sizes(), dims.strides(), at::TensorOptions().dtype(at::kByte).device(at::kMeta));
      // It names strides, which view would have found.
      const bool names_strides = call_.name() == "_reshape_alias";
      for (const auto& value : names_strides ? torch::jit::Stack{telling.view(call_.operand(1).toIntVector())}
                                             : call_.call(arguments_on(telling)))
        for_tensors(value, [&](const at::Tensor& tensor, int64_t) { shown.push_back(tensor); });
    } catch (const c10::Error&) {
      shown.clear();
    }
    return shown;
  }

  /// How the view's piece is placed; null: it has none.
  DTensorSpec::Ptr placed(const ViewedDims& dims, const at::Tensor& shown, const at::Tensor& geometry) const {
    const auto& spec = viewed_.spec();
    auto placements = spec.placements();
    for (size_t m = 0; m < placements.size(); ++m) {
      const auto dim = sharded_dim(placements[m]);
      if (!dim) continue;
      const auto now = kept_as(dims, shown, *dim, spec.sizes()[static_cast<size_t>(*dim)]);
      if (!now && spec.is_cut(*dim)) return nullptr;
      if (now)
        set_sharded_dim(placements[m], *now);
      else
        placements[m] = Replicate{};
    }
    const bool is_dense = geometry.is_non_overlapping_and_dense();
    return spec_like(spec, geometry.sizes().vec(), std::move(placements),
                   is_dense ? at::OptionalIntArrayRef(geometry.strides()) : std::nullopt);
  }

  bool shows_all(const DTensorImpl::Geometry& lies) const {
    return lies.sizes == viewed_.sizes() && lies.strides == viewed_.strides() && lies.offset == viewed_.storage_offset();
  }

  at::Tensor view_of(const at::Tensor& geometry, const at::Tensor& shown) const {
    const DTensorImpl::Geometry lies{geometry.sizes(), geometry.strides(), geometry.storage_offset()};
    DTensorValue value{.spec = viewed_.value().spec};
    if (shown.defined()) {
      const ViewedDims dims(viewed_);
      if (auto spec = placed(dims, shown, geometry)) {
        value.local = local_view(dims, shown, *spec);
        if (value.local.defined()) value.spec = std::move(spec);
      }
    } else if (viewed_.has_piece() && viewed_.spec().is_flat() && shows_all(lies)) {
      const auto& local = viewed_.local();
      value.local = local.as_strided(local.sizes(), local.strides(), local.storage_offset());
    }
    return at::Tensor(c10::make_intrusive<DTensorImpl>(viewed_, base_, std::move(value), lies));
  }

  at::Tensor local_view(const ViewedDims& dims, const at::Tensor& shown, const DTensorSpec& spec) const {
    const auto& local = viewed_.local();
    std::vector<int64_t> strides;
    for (int64_t i = 0; i < shown.dim(); ++i) strides.push_back(*dims.with_strides(shown.stride(i), local.strides()));
    const auto offset = *dims.with_strides(shown.storage_offset(), local.strides());
    return local.as_strided(spec.piece().sizes, strides, local.storage_offset() + offset);
  }

  const OperatorCall& call_;
  const DTensorImpl& viewed_;
  const at::Tensor base_;
};

}  // namespace

void run_view(const OperatorCall& call) {
  if (!call.operand(0).isTensor()) return run_general(call);
  const auto self = call.operand(0).toTensor();
  const auto* viewed = DTensorImpl::of(self);
  if (viewed == nullptr) return run_general(call);
  ViewCall(call, *viewed, self).run();
}

}  // namespace fsdp
