#include "spread_call.hpp"

#include <ATen/CPUGeneratorImpl.h>

#include <sstream>

#include "dtensor/rules/operator_call.hpp"
#include "excluded.hpp"
#include "support/ranks.hpp"
#include "tensor/whole_tensors.hpp"

namespace fsdp::test {

namespace {

at::Tensor junk(const at::Tensor& like) { return at::ones_like(like, at::MemoryFormat::Contiguous); }

/// A base and a view of it that shows `tensor`.
Operand dressed(Draw& draw, const at::Tensor& tensor) {
  using enum Operand::View;
  Operand operand{.base = tensor};
  const int64_t ndim = tensor.dim();
  operand.sizes = tensor.sizes().vec();
  if (tensor.numel() == 0 || draw.between(0, 9) < 6) return operand;
  operand.view = draw.one_of<Operand::View>({kTranspose, kNarrow, kSelect, kReshape});
  if (ndim == 0 && operand.view != kSelect) operand.view = kNone;
  if (operand.view == kTranspose && ndim < 2) operand.view = kNone;
  operand.dim = ndim == 0 ? 0 : draw.between(0, ndim - 1);
  switch (operand.view) {
    case kNone: break;
    case kTranspose: operand.base = tensor.transpose(0, operand.dim = ndim - 1).contiguous(); break;
    case kNarrow: operand.base = at::cat({junk(tensor.narrow(operand.dim, 0, 1)), tensor, junk(tensor)}, operand.dim); break;
    case kSelect: operand.base = at::stack({junk(tensor), tensor}, operand.dim); break;
    case kReshape: operand.base = tensor.reshape({-1}).clone(); break;
  }
  return operand;
}

bool may_be_sum(const at::Tensor& base) {
  return base.scalar_type() == at::kFloat || base.scalar_type() == at::kDouble || base.scalar_type() == at::kLong;
}

std::vector<Placement> draw_operand_placements(Draw& draw, const at::Tensor& base, const std::vector<int64_t>& mesh_shape) {
  auto placements = draw_cuts(draw, base.dim(), mesh_shape);
  if (draw.between(0, 3) == 0) placements.assign(mesh_shape.size(), Shard{0});
  const auto any = static_cast<size_t>(draw.between(0, static_cast<int64_t>(mesh_shape.size()) - 1));
  if (may_be_sum(base) && draw.between(0, 9) == 0) placements[any] = Partial{};
  return placements;
}

void spread_operands(Draw& draw, SpreadCall& call) {
  const Operand* leader = nullptr;
  for (auto& operand : call.operands) {
    operand.is_dtensor = draw.between(0, 3) > 0;
    operand.placements = draw_operand_placements(draw, operand.base, call.mesh_shape);
    if (leader != nullptr && leader->base.dim() == operand.base.dim() && draw.between(0, 4) > 0) {
      operand.placements = leader->placements;
      if (!may_be_sum(operand.base)) operand.placements = without_partial(operand.placements);
    }
    if (leader == nullptr) leader = &operand;
  }
  auto& one = call.operands[static_cast<size_t>(draw.between(0, static_cast<int64_t>(call.operands.size()) - 1))];
  one.is_dtensor = true;
}

c10::IValue copied(const c10::IValue& value) {
  auto copy = value;
  replace_tensors(copy, [](const at::Tensor& tensor, int64_t) { return tensor.detach().clone(); });
  return copy;
}

std::vector<at::Tensor> copies(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> copies;
  for (const auto& tensor : tensors) copies.push_back(tensor.clone());
  return copies;
}

bool returns_views(const c10::OperatorHandle& op) {
  for (const auto& result : op.schema().returns())
    if (result.alias_info() != nullptr && !result.alias_info()->isWrite()) return true;
  return false;
}

/// Whether the plain operator takes what it refuses, if it lies in memory without gaps and is no view.
bool takes_in_order(const SpreadCall& call) {
  std::vector<at::Tensor> tensors;
  for (const auto& operand : call.operands) tensors.push_back(operand.viewed(operand.base).clone(at::MemoryFormat::Contiguous));
  try {
    run_operator(call, with_tensors(call, tensors));
  } catch (const std::exception&) {
    return false;
  }
  return true;
}

/// Whether the plain operator gives the same on tensors without gaps: some kernels of LibTorch do not, for an `out` above all.
/// Or they write beside the view.
bool hangs_on_strides(const SpreadCall& call, const torch::jit::Stack& results, const std::vector<at::Tensor>& bases) {
  std::vector<at::Tensor> tensors;
  for (const auto& operand : call.operands)
    tensors.push_back(operand.same_as ? tensors[*operand.same_as] : operand.viewed(operand.base).clone(at::MemoryFormat::Contiguous));
  try {
    const auto others = run_operator(call, with_tensors(call, tensors));
    for (size_t i = 0; i < results.size(); ++i)
      if (difference(others[i], results[i], true)) return true;
    for (size_t i = 0; i < tensors.size(); ++i) {
      const auto base = call.operands[i].base.clone();
      call.operands[i].viewed(base).copy_(tensors[i]);
      if (difference(bases[i], base, true)) return true;
    }
  } catch (const std::exception&) {
    return true;
  }
  return false;
}

/// oneDNN takes no operands of different sizes where LibTorch's kernels, which may run on their pieces, broadcast them.
bool is_of_onednn(const std::string& refusal) {
  return refusal.find("could not create a primitive descriptor") != refusal.npos;
}

void run_plain(SpreadCall& call) {
  std::vector<at::Tensor> tensors, bases;
  for (const auto& operand : call.operands) {
    if (operand.same_as) {
      tensors.push_back(tensors[*operand.same_as]), bases.push_back(bases[*operand.same_as]);
      continue;
    }
    bases.push_back(operand.base.clone());
    tensors.push_back(operand.viewed(bases.back()));
  }
  torch::jit::Stack results;
  try {
    results = run_operator(call, with_tensors(call, tensors));
  } catch (const std::exception& error) {
    call.refuses = true;
    call.refusal = message_of(error);
    call.is_unusable = takes_in_order(call) || is_of_onednn(call.refusal);
    return;
  }
  for (const auto& result : results) call.results.push_back(copied(result));
  for (const auto& result : tensors_of(results)) {
    const auto is_it = [&](const at::Tensor& tensor) { return tensor.is_same(result); };
    const auto found = std::find_if(tensors.begin(), tensors.end(), is_it);
    call.result_is.push_back(found == tensors.end() ? -1 : static_cast<int>(found - tensors.begin()));
  }
  call.bases = copies(bases);
  call.is_unusable = !leaves_values_open(call.drawn.op) && hangs_on_strides(call, call.results, call.bases);
  if (!returns_views(call.drawn.op)) return;
  const auto views = tensors_of(results);
  const auto is_shown = [&](const at::Tensor& base) { return views[0].is_alias_of(base); };
  if (views.empty() || std::none_of(bases.begin(), bases.end(), is_shown)) return;
  try {
    views[0].fill_(3);
    call.bases_written_through = copies(bases);
  } catch (const std::exception&) {  // it shows an element twice
  }
}

std::string values_difference(const at::Tensor& actual, const at::Tensor& expected) {
  const auto dtype = expected.scalar_type();
  if (!at::isFloatingType(dtype) && !at::isComplexType(dtype)) return at::equal(actual, expected) ? "" : "other values";
  const auto as_double = at::isComplexType(dtype) ? at::kComplexDouble : at::kDouble;
  const auto a = actual.to(as_double), e = expected.to(as_double);
  const double relative = at::isReducedFloatingType(dtype) ? 2e-2 : dtype == at::kDouble || dtype == at::kComplexDouble ? 1e-6 : 2e-5;
  const auto finite = e.isfinite();
  if (!at::equal(finite, a.isfinite())) return "infinite elsewhere";
  if (!at::equal(e.isnan(), a.isnan())) return "nan elsewhere";
  const auto unlike = (a - e).abs().masked_fill(finite.logical_not(), 0).max().item<double>();
  const auto largest = e.abs().masked_fill(finite.logical_not(), 0).max().item<double>();
  if (unlike > relative * std::max(largest, 1.0)) return fmt::format("differs by {:.3g}", unlike);
  if (!at::isComplexType(dtype) && !at::equal(a.masked_select(e.isinf()), e.masked_select(e.isinf()))) return "another infinity";
  return "";
}

}  // namespace

at::Tensor Operand::viewed(const at::Tensor& of) const {
  switch (view) {
    case View::kNone: return of;
    case View::kTranspose: return of.transpose(0, dim);
    case View::kNarrow: return of.narrow(dim, 1, sizes[static_cast<size_t>(dim)]);
    case View::kSelect: return of.select(dim, 1);
    case View::kReshape: return of.view(sizes);
  }
  return of;
}

std::string Operand::text() const {
  static const std::vector<std::string> views = {"", " transposed", " narrowed", " selected", " reshaped"};
  if (same_as) return fmt::format("operand {} again", *same_as);
  const auto base_text = view == View::kNone ? "" : fmt::format(" of {}", base.sizes().vec());
  return fmt::format("{} {}{}{}{}", c10::toString(base.scalar_type()), sizes, views[static_cast<size_t>(view)], base_text,
                     is_dtensor ? " " + to_string(placements) : " plain");
}

std::string SpreadCall::text() const {
  std::ostringstream out;
  out << "FSDP_TEST_SEED=" << seed << " FSDP_TEST_OPERATOR=" << drawn.op.operator_name();
  out << " on mesh " << c10::IntArrayRef(mesh_shape) << ":";
  size_t next = 0;
  const auto& arguments = drawn.op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    out << "\n    " << arguments[i].name() << " = ";
    const size_t begin = next;
    for_tensors(drawn.arguments[i], [&](const at::Tensor&, int64_t) {
      out << (next > begin ? ", " : "") << operands[next].text();
      ++next;
    });
    if (next == begin) out << drawn.arguments[i];
  }
  if (refuses) out << "\n    refused: " << refusal;
  return out.str();
}

std::vector<at::Tensor> tensors_of(const std::vector<c10::IValue>& values) {
  std::vector<at::Tensor> tensors;
  for (const auto& value : values) for_tensors(value, [&](const at::Tensor& tensor, int64_t) { tensors.push_back(tensor); });
  return tensors;
}

std::vector<c10::IValue> with_tensors(const SpreadCall& call, const std::vector<at::Tensor>& tensors) {
  auto arguments = call.drawn.arguments;
  size_t next = 0;
  for (auto& value : arguments) replace_tensors(value, [&](const at::Tensor&, int64_t) { return tensors[next++]; });
  if (const auto generator = generator_argument(call.drawn.op))
    arguments[*generator] = at::detail::createCPUGenerator(call.drawn.generator_seed);
  return arguments;
}

torch::jit::Stack run_operator(const SpreadCall& call, std::vector<c10::IValue> arguments) {
  torch::jit::Stack stack(std::make_move_iterator(arguments.begin()), std::make_move_iterator(arguments.end()));
  const auto run = [&] { call.drawn.op.callBoxed(&stack); };
  if (is_random(call.drawn.op) && !generator_argument(call.drawn.op))
    seeded(call.drawn.generator_seed, [&] { run(); return 0; });
  else
    run();
  return stack;
}

SpreadCall spread(Draw& draw, DrawnCall drawn, const std::vector<int64_t>& mesh_shape) {
  SpreadCall call{.drawn = std::move(drawn), .operands = {}, .mesh_shape = mesh_shape};
  const auto& op = call.drawn.op;
  for (size_t i = 0; i < call.drawn.arguments.size(); ++i)
    for_tensors(call.drawn.arguments[i], [&](const at::Tensor& tensor, int64_t) {
      call.operands.push_back(dressed(draw, tensor));
      if (info_of(op).writes != 0 && !op.hasTag(at::Tag::pointwise)) return;  // where operands overlap, what it gives is open
      if (op.schema().arguments()[i].is_out() || draw.between(0, 9) > 0) return;
      for (size_t k = 0; k + 1 < call.operands.size(); ++k)
        if (call.operands[k].sizes == tensor.sizes() && call.operands[k].base.scalar_type() == tensor.scalar_type()) {
          call.operands.back() = call.operands[k];
          call.operands.back().same_as = k;
        }
    });
  if (call.operands.empty()) {
    call.refuses = true;
    return call;
  }
  spread_operands(draw, call);
  for (auto& operand : call.operands)
    if (operand.same_as) operand.is_dtensor = call.operands[*operand.same_as].is_dtensor;
  run_plain(call);
  return call;
}

std::optional<std::string> difference(const at::Tensor& actual, const at::Tensor& expected, bool compares_values) {
  if (!actual.defined() || !expected.defined())
    return actual.defined() == expected.defined() ? std::nullopt : std::optional<std::string>("one is undefined");
  if (actual.sizes() != expected.sizes()) return fmt::format("expected sizes {}, found {}", expected.sizes().vec(), actual.sizes().vec());
  if (actual.scalar_type() != expected.scalar_type())
    return fmt::format("expected {}, found {}", c10::toString(expected.scalar_type()), c10::toString(actual.scalar_type()));
  const auto whole = is_dtensor(actual) ? DTensor(actual).full_tensor() : actual;
  if (whole.sizes() != expected.sizes()) return fmt::format("the whole has sizes {}", whole.sizes().vec());
  if (!compares_values || expected.numel() == 0 || expected.layout() != c10::kStrided) return std::nullopt;
  const auto text = values_difference(whole.resolve_conj().resolve_neg(), expected.resolve_conj().resolve_neg());
  return text.empty() ? std::nullopt : std::optional(text);
}

std::optional<std::string> difference(const c10::IValue& actual, const c10::IValue& expected, bool compares_values) {
  const auto found = tensors_of({actual}), wanted = tensors_of({expected});
  if (found.size() != wanted.size()) return fmt::format("expected {} tensors, found {}", wanted.size(), found.size());
  for (size_t i = 0; i < found.size(); ++i)
    if (auto text = difference(found[i], wanted[i], compares_values)) return text;
  if (!wanted.empty() || !compares_values) return std::nullopt;
  if (expected.isTensor() || expected.isList())
    return actual.tagKind() == expected.tagKind() ? std::nullopt : std::optional<std::string>("another kind");
  std::ostringstream a, e;
  a << actual, e << expected;
  return a.str() == e.str() ? std::nullopt : std::optional(fmt::format("expected {}, found {}", e.str(), a.str()));
}

}  // namespace fsdp::test
