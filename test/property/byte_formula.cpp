#include "property/byte_formula.hpp"

#include <algorithm>
#include <numeric>
#include <optional>

namespace fsdp::test {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

/// What each rank holds of one tensor, or of one flat run.
struct Held {
  int64_t bytes = 0;       ///< padded
  bool side_by_side = true;  ///< the ranks' pieces lie one after another in the whole
};

Moved moved(const PlainGroup& group, const std::vector<Held>& held) {
  Moved result;
  if (held.size() == 1) {
    // One alone has no neighbour to be aligned for.
    result.padded = result.launched = group.ranks * held[0].bytes;
    return result;
  }
  for (const auto& piece : held) {
    const int64_t aligned = round_up(piece.bytes, 16);
    const bool is_packed = !group.launches_batches || !piece.side_by_side || piece.bytes < group.packs_below;
    result.padded += group.ranks * aligned;
    result.launched += group.ranks * (is_packed ? aligned : piece.bytes);
  }
  return result;
}

/// ceil(n / W) of the rows, each of numel / n elements.
Held held_of(const PlainParam& param, int64_t ranks, int64_t itemsize) {
  const auto& tensor = param.tensor;
  if (tensor.dim() == 0) return {.bytes = itemsize};
  const int64_t rows = tensor.size(param.dim);
  if (rows <= 1 || ranks == 1) return {.bytes = tensor.numel() * itemsize};
  int64_t outside = 1;  // dimensions that lie further apart in memory than the rows
  for (int64_t d = 0; d < tensor.dim(); ++d)
    if (tensor.stride(d) > tensor.stride(param.dim)) outside *= tensor.size(d);
  return {.bytes = ceil_div(rows, ranks) * (tensor.numel() / rows) * itemsize, .side_by_side = outside == 1};
}

/// Where the items begin that lie one after another in W pieces of so many elements with no block cut; none: they
/// do not fit.
std::optional<std::vector<int64_t>> starts_in(const std::vector<const PlainParam*>& run, int64_t piece, int64_t ranks,
                                              int64_t alignment) {
  std::vector<int64_t> starts;
  int64_t cursor = 0;
  for (const auto* param : run) {
    const int64_t numel = param->tensor.numel();
    const auto cuts_a_block = [&](int64_t start) {
      if (numel == 0) return false;
      for (int64_t cut = (start / piece + 1) * piece; cut < start + numel; cut += piece)
        if ((cut - start) % param->block != 0) return true;
      return false;
    };
    int64_t start = round_up(cursor, alignment);
    while (start + numel <= piece * ranks && cuts_a_block(start)) start += alignment;
    if (start + numel > piece * ranks) return std::nullopt;
    starts.push_back(start);
    cursor = start + numel;
  }
  return starts;
}

struct FlatPlan {
  int64_t piece;
  std::vector<int64_t> starts;
};

/// The least aligned piece that will do.
FlatPlan flat_plan(const std::vector<const PlainParam*>& run, int64_t ranks) {
  const int64_t itemsize = std::min(run.front()->itemsize, run.front()->stored_itemsize);
  const int64_t alignment = std::max<int64_t>(1, 16 / itemsize);
  int64_t total = 0;
  for (const auto* param : run) total = round_up(total, alignment) + param->tensor.numel();
  int64_t piece = round_up(ceil_div(total, ranks), alignment);
  for (;; piece += alignment)
    if (const auto starts = starts_in(run, piece, ranks, alignment)) return {piece, *starts};
}

int64_t flat_piece(const std::vector<const PlainParam*>& run, int64_t ranks) { return flat_plan(run, ranks).piece; }

std::vector<const PlainParam*> run_of(const PlainGroup& group, bool trainable) {
  std::vector<const PlainParam*> run;
  for (const auto& param : group.params)
    if (param.is_trainable == trainable) run.push_back(&param);
  return run;
}

Moved all_of(const PlainGroup& group, int64_t PlainParam::*itemsize) {
  std::vector<Held> held;
  if (!group.is_flat) {
    for (const auto& param : group.params)
      held.push_back(param.is_gone ? Held{} : held_of(param, group.ranks, param.*itemsize));
    return moved(group, held);
  }
  // A run stays as it is when a parameter leaves it.
  for (const bool trainable : {true, false})
    if (const auto run = run_of(group, trainable); !run.empty())
      held.push_back({.bytes = flat_piece(run, group.ranks) * (run.front()->*itemsize)});
  return moved(group, held);
}

}  // namespace

Moved gathered_by(const PlainGroup& group) { return all_of(group, &PlainParam::itemsize); }

int64_t stored_by(const PlainGroup& group) { return all_of(group, &PlainParam::stored_itemsize).padded; }

Moved reduced_by(const PlainGroup& group, const std::function<bool(size_t)>& takes_part, at::ScalarType dtype) {
  const auto itemsize = static_cast<int64_t>(c10::elementSize(dtype));
  std::vector<Held> held;
  if (group.is_flat) {
    held.push_back({.bytes = flat_piece(run_of(group, true), group.ranks) * itemsize});
  } else {
    for (size_t i = 0; i < group.params.size(); ++i)
      if (takes_part(i)) held.push_back(held_of(group.params[i], group.ranks, itemsize));
  }
  return moved(group, held);
}

namespace {

/// The elements as they lie in memory with the parameter's strides.
at::Tensor in_memory(const PlainParam& param, const at::Tensor& whole) {
  std::vector<int64_t> dims(static_cast<size_t>(whole.dim()));
  std::iota(dims.begin(), dims.end(), 0);
  std::stable_sort(dims.begin(), dims.end(),
                   [&](int64_t a, int64_t b) { return param.tensor.stride(a) > param.tensor.stride(b); });
  return whole.permute(dims).reshape({-1});
}

}  // namespace

at::Tensor held_by(const PlainGroup& group, const PlainParam& param, int64_t rank, const at::Tensor& whole) {
  if (group.is_flat) {
    const auto run = run_of(group, param.is_trainable);
    const auto plan = flat_plan(run, group.ranks);
    const auto place = static_cast<size_t>(std::find(run.begin(), run.end(), &param) - run.begin());
    const auto within = [&](int64_t cut) { return std::clamp<int64_t>(cut - plan.starts[place], 0, whole.numel()); };
    const int64_t begin = within(rank * plan.piece), end = within((rank + 1) * plan.piece);
    return in_memory(param, whole).narrow(0, begin, end - begin);
  }
  if (whole.dim() == 0) return whole.reshape({1}).narrow(0, 0, rank == 0);
  const int64_t rows = whole.size(param.dim), chunk = ceil_div(rows, group.ranks);
  const int64_t begin = std::min(rank * chunk, rows), end = std::min(begin + chunk, rows);
  return whole.narrow(param.dim, begin, end - begin).reshape({-1});
}

}  // namespace fsdp::test
