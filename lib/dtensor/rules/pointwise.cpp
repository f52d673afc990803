#include <ATen/ATen.h>

#include <array>
#include <unordered_set>

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

/// Orders operands: results are as large as the one with the largest extent. Lists come before tensors, which stand beside
/// them: lr, found_inf.
std::array<int64_t, 3> extent(const c10::IValue& value) {
  if (!value.isTensor()) return {1, 0, 0};
  return {0, value.toTensor().dim(), value.toTensor().numel()};
}

/// Returns the argument that leads; none: no DTensor is where it would have to be.
std::optional<size_t> leading_argument(const OperatorCall& call) {
  std::optional<size_t> leader;
  for (size_t i = 0; i < call.count(); ++i) {
    if (call.info().writes != 0 && !call.is_written(i)) continue;
    if (!has_dtensor(call.operand(i))) continue;
    if (!leader || extent(call.operand(i)) > extent(call.operand(*leader))) leader = i;
  }
  return leader;
}

/// Whether a zero in one rank's piece would be refused there, and nowhere else.
bool may_divide_by_zero(const OperatorCall& call) {
  static const std::unordered_set<std::string_view> names{"div",           "div_",      "divide",     "divide_", "floor_divide",
                                                          "floor_divide_", "remainder", "remainder_", "fmod",    "fmod_"};
  if (!names.contains(call.name())) return false;
  bool are_whole_numbers = true;
  for (const auto& value : call.operands())
    for_tensors(
        value, [&](const at::Tensor& tensor, int64_t) { are_whole_numbers &= at::isIntegralType(tensor.scalar_type(), true); });
  return are_whole_numbers;
}

/// Returns the DTensors of an operand; empty if one has no piece.
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

/// Returns what stands beside the leader's piece for a tensor that broadcasts to its sizes: its part, but for the dimensions
/// along which it is repeated.
at::Tensor part_beside(const at::Tensor& plain, const DTensorSpec& leader) {
  if (plain.dim() == 0 || leader.is_replicated()) return plain;
  if (leader.is_flat()) return part_of(leader, plain.expand(leader.sizes()));
  TensorPiece all{.data = plain, .indices = {}};
  std::vector<IndexRanges> wanted;
  for (int64_t i = 0; i < plain.dim(); ++i) {
    all.indices.push_back(all_indices(plain.size(i)));
    const auto dim = static_cast<size_t>(leader.ndim() - plain.dim() + i);
    const bool is_repeated = plain.size(i) == 1;
    wanted.push_back(is_repeated ? all.indices.back() : leader.piece().indices[dim]);
  }
  return cut(all, wanted).data;
}

/// See Note [Ranks without elements].
bool lacks_elements(const DTensorImpl& leader) { return leader.local().numel() == 0 && leader.numel() > 0; }

/// The operands in pieces.
class Pieces {
 public:
  Pieces(const OperatorCall& call, const Leaders& leaders, bool is_list) : call_(call), leaders_(leaders), is_list_(is_list) {}

  /// Looks whether all operands fit, without communication. False: the general rule has to do it.
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
    if (stands_alone(position)) return !is_written || DTensorImpl::of(tensor) == nullptr;
    if (position >= static_cast<int64_t>(leaders_.size())) return false;
    const auto& lead = leader(position);
    const auto* dtensor = DTensorImpl::of(tensor);
    if (dtensor != nullptr && dtensor->has_piece() && dtensor->spec().is_placed_as(lead.spec())) return true;
    if (is_written && (dtensor != nullptr || tensor.dim() > 0)) return false;
    // A scalar beside a scalar whose piece has a dimension would not decide the dtype of the result.
    if (!is_list_ && lead.spec().is_flat() && lead.dim() == 0) return false;
    return (is_list_ && tensor.dim() == 0) || broadcasts_to(tensor.sizes(), lead.spec());
  }

  at::Tensor piece(const at::Tensor& tensor, int64_t position) const {
    const auto* dtensor = DTensorImpl::of(tensor);
    const bool is_alone = stands_alone(position);
    if (dtensor == nullptr && (is_alone || tensor.dim() == 0)) return at::Tensor();
    if (is_alone) return dtensor->whole(call_.name());
    const auto& lead = leader(position);
    if (dtensor == nullptr) return shown(part_beside(tensor, lead.spec()), lead);
    if (dtensor->has_piece() && dtensor->spec().is_placed_as(lead.spec())) return shown(dtensor->local(), lead);
    return shown(part_beside(dtensor->whole(call_.name()), lead.spec()), lead);
  }

  static at::Tensor shown(const at::Tensor& piece, const DTensorImpl& lead) {
    return lacks_elements(lead) && piece.numel() == 0 ? with_elements(piece, lead.dim() == 0) : piece;
  }

  const OperatorCall& call_;
  const Leaders& leaders_;
  const bool is_list_;
};

}  // namespace

at::Tensor with_elements(const at::Tensor& piece, bool is_scalar) {
  auto sizes = piece.sizes().vec();
  if (is_scalar) sizes.clear();
  std::replace(sizes.begin(), sizes.end(), int64_t{0}, int64_t{1});
  return at::ones(sizes, piece.options());
}

bool run_pointwise(const OperatorCall& call) {
  const auto leading = leading_argument(call);
  if (!leading) return false;
  const auto leaders = leaders_of(call.operand(*leading));
  if (leaders.empty()) return false;
  if (leaders[0]->spec().is_flat() && !call.in_format(leaders[0]->value().spec)) return false;
  const Pieces pieces(call, leaders, !call.operand(*leading).isTensor());
  if (!pieces.fit() || may_divide_by_zero(call)) return false;
  auto results = call.call(pieces.make());
  call.note_writes_of_nothing();
  call.give_results(std::move(results), [&](const at::Tensor& result, int64_t position) {
    const auto& leader = *leaders[static_cast<size_t>(std::max<int64_t>(position, 0))];
    const auto piece = lacks_elements(leader) ? result.new_empty(leader.spec().piece().sizes) : result;
    const auto spec = call.in_format(leader.value().spec);
    return call.name() == "clone" ? make_copy(piece, spec) : make_dtensor(piece, spec);
  });
  return true;
}

}  // namespace fsdp
