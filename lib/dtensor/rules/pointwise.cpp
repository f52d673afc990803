#include <ATen/ATen.h>

#include "dtensor/rules/propagate.hpp"
#include "tensor/piece.hpp"

// Element by element. A leader says how results are placed: what is written, else the operand with the most dimensions; of an
// operator on lists there is one for each position. Operands placed as their leader take part with their pieces, of others this
// rank's part is cut.
namespace fsdp {

namespace {

using Leaders = std::vector<const DTensorImpl*>;

bool has_dtensor(const c10::IValue& value) {
  bool found = false;
  for_tensors(value, [&](const at::Tensor& tensor, int64_t) { found |= DTensorImpl::of(tensor) != nullptr; });
  return found;
}

/// By which of two operands results are as large as they get.
std::pair<int64_t, int64_t> extent(const c10::IValue& value) {
  if (!value.isTensor()) return {0, 0};
  return {value.toTensor().dim(), value.toTensor().numel()};
}

/// Which argument leads; none: no DTensor is where it would have to be.
std::optional<size_t> leading_argument(const OperatorCall& call) {
  std::optional<size_t> leader;
  for (size_t i = 0; i < call.count(); ++i) {
    if (call.form().writes != 0 && !call.is_written(i)) continue;
    if (!has_dtensor(call.operand(i))) continue;
    if (!leader || extent(call.operand(i)) > extent(call.operand(*leader))) leader = i;
  }
  return leader;
}

/// Empty if one has no piece.
Leaders leaders_of(const c10::IValue& value) {
  Leaders leaders;
  if (value.isTensor()) {
    leaders.push_back(DTensorImpl::of(value.toTensor()));
  } else {
    for (const auto& element : value.toListRef())
      leaders.push_back(element.toTensor().defined() ? DTensorImpl::of(element.toTensor()) : nullptr);
  }
  const bool have_pieces =
      std::all_of(leaders.begin(), leaders.end(), [](const auto* one) { return one != nullptr && one->has_piece(); });
  return have_pieces ? leaders : Leaders();
}

/// Whether an ordinary tensor broadcasts to the leader's sizes without making them larger.
bool broadcasts_to(c10::IntArrayRef sizes, const DTensorSpec& leader) {
  const auto ndim = static_cast<int64_t>(sizes.size());
  if (ndim > leader.ndim()) return false;
  for (int64_t i = 0; i < ndim; ++i) {
    const auto whole = leader.sizes()[static_cast<size_t>(leader.ndim() - ndim + i)];
    if (sizes[static_cast<size_t>(i)] != 1 && sizes[static_cast<size_t>(i)] != whole) return false;
  }
  return true;
}

/// What stands beside the leader's piece for a tensor that broadcasts to its sizes: its part, but for the dimensions along
/// which it is repeated.
at::Tensor part_beside(const at::Tensor& plain, const DTensorSpec& leader) {
  if (plain.dim() == 0 || leader.is_replicated()) return plain;
  TensorPiece all{.data = plain, .indices = {}};
  std::vector<IndexRanges> wanted;
  for (int64_t i = 0; i < plain.dim(); ++i) {
    all.indices.push_back(all_indices(plain.size(i)));
    const auto dim = static_cast<size_t>(leader.ndim() - plain.dim() + i);
    const bool is_repeated = plain.size(i) == 1;
    wanted.push_back(is_repeated ? all.indices.back() : leader.piece().indices[dim]);
  }
  return part_of(all, wanted).data;
}

/// The operands in pieces.
class Pieces {
 public:
  Pieces(const OperatorCall& call, const Leaders& leaders, bool is_list) : call_(call), leaders_(leaders), is_list_(is_list) {}

  /// Without communication. False: an operand does not fit, for which the general rule is.
  bool fit() const {
    bool fits = true;
    for (size_t i = 0; i < call_.count(); ++i)
      for_tensors(call_.operand(i), [&](const at::Tensor& tensor, int64_t position) {
        fits = fits && fits_in(tensor, position, call_.is_written(i));
      });
    return fits;
  }
  OperatorCall::Arguments make() const {
    auto arguments = call_.arguments();
    for (auto& value : arguments)
      replace_tensors(value, [&](const at::Tensor& tensor, int64_t position) { return piece(tensor, position); });
    return arguments;
  }

 private:
  /// lr, found_inf and scalars of an operator on lists.
  bool stands_alone(int64_t position) const { return is_list_ && position < 0; }
  const DTensorImpl& leader(int64_t position) const { return *leaders_[static_cast<size_t>(std::max<int64_t>(position, 0))]; }

  bool fits_in(const at::Tensor& tensor, int64_t position, bool is_written) const {
    if (stands_alone(position)) return true;
    if (position >= static_cast<int64_t>(leaders_.size())) return false;
    const auto& lead = leader(position);
    const auto* dtensor = DTensorImpl::of(tensor);
    if (dtensor != nullptr && dtensor->has_piece() && dtensor->spec().is_placed_as(lead.spec())) return true;
    if (is_written && (dtensor != nullptr || tensor.dim() > 0)) return false;
    return (is_list_ && tensor.dim() == 0) || broadcasts_to(tensor.sizes(), lead.spec());
  }

  at::Tensor piece(const at::Tensor& tensor, int64_t position) const {
    const auto* dtensor = DTensorImpl::of(tensor);
    const bool is_alone = stands_alone(position);
    if (dtensor == nullptr) return is_alone || tensor.dim() == 0 ? at::Tensor() : part_beside(tensor, leader(position).spec());
    if (is_alone) return dtensor->whole(call_.name());
    const auto& lead = leader(position);
    if (dtensor->has_piece() && dtensor->spec().is_placed_as(lead.spec())) return dtensor->local();
    return part_beside(dtensor->whole(call_.name()), lead.spec());
  }

  const OperatorCall& call_;
  const Leaders& leaders_;
  const bool is_list_;
};

}  // namespace

bool run_pointwise(const OperatorCall& call) {
  const auto leading = leading_argument(call);
  if (!leading) return false;
  const auto leaders = leaders_of(call.operand(*leading));
  if (leaders.empty()) return false;
  const Pieces pieces(call, leaders, !call.operand(*leading).isTensor());
  if (!pieces.fit()) return false;
  auto results = call.call(pieces.make());
  call.give_results(std::move(results), [&](const at::Tensor& result, int64_t position) {
    return make_dtensor(result, leaders[static_cast<size_t>(std::max<int64_t>(position, 0))]->value().spec);
  });
  return true;
}

}  // namespace fsdp
