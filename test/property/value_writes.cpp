#include "property/value_writes.hpp"

#include <ATen/CPUGeneratorImpl.h>

namespace fsdp::test {
namespace {

/// Small, or what follows would grow.
at::Tensor values_for(const at::Tensor& parameter, uint64_t seed) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  const auto values = torch::rand(parameter.sizes(), generator, at::TensorOptions(at::kDouble)) - 0.5;
  return values.to(parameter.scalar_type());
}

bool have_one_form(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && a.strides() == b.strides() && a.scalar_type() == b.scalar_type();
}

}  // namespace

ValueWrites::ValueWrites(const RandomTree& tree, const torch::nn::Module& model)
    : is_cast_(tree.training.param_dtype.has_value()) {
  if (tree.written_probability == 0) return;
  std::vector<Slice> slices;
  for (const auto& part : sliced_parts(model))
    for (auto& slice : part->slices()) slices.push_back(std::move(slice));
  for (const auto& [name, parameter] : unique_parameters(model)) {
    Param param{.name = name, .member = parameter};
    for (const auto& slice : slices) {
      if (!slice.tensor.is_same(parameter)) continue;
      param.is_slice = true;
      // Flat, a rank's rows are registered; told what differs, the library knows one expert.
      param.shows_whole = slice.is_expert ? !tree.experts_differ : tree.other_layout_probability == 0;
    }
    params_.push_back(std::move(param));
  }
  Draw draw(tree.seed * 122949829 + 5);
  for (int step = 0; step < tree.training.steps; ++step)
    for (const auto place : {Place::kFirst, Place::kBehindEvaluation})
      if (draw.chance(tree.written_probability))
        for (int64_t i = draw.number(1, 3); i > 0; --i) add(draw, step, place);
}

void ValueWrites::add(Draw& draw, int step, Place place) {
  Write write{.step = step,
              .place = place,
              .way = static_cast<Way>(draw.number(0, static_cast<int64_t>(Way::kExchangeDataInPlace))),
              .by = draw.chance(0.6) ? By::kSharded : By::kMember,
              .param = static_cast<size_t>(draw.number(0, static_cast<int64_t>(params_.size()) - 1)),
              .other = 0,
              .seed = static_cast<uint64_t>(draw.number(1, 1'000'000))};
  const auto& param = params_[write.param];
  const bool needs_whole = write.way >= Way::kFillPartOfData;
  if (needs_whole && !param.shows_whole) return;
  // A member has the sizes of a slice, and the dtype that it computes in: what is written there would be rounded.
  if (needs_whole && (param.is_slice || is_cast_)) write.by = By::kSharded;
  // In a step, by a view, or of a slice, a member that is cast is written in the dtype that it computes in.
  const bool is_rounded = place == Place::kBehindEvaluation || write.way == Way::kScaleViewOfData || param.is_slice;
  if (is_cast_ && is_rounded) write.by = By::kSharded;
  if (write.way == Way::kFillPartOfData && (param.member.dim() == 0 || param.member.size(0) == 0)) return;
  if (write.way >= Way::kExchangeByCopy) {
    std::vector<size_t> others;
    for (size_t i = 0; i < params_.size(); ++i)
      if (i != write.param && params_[i].shows_whole && have_one_form(params_[i].member, param.member)) others.push_back(i);
    if (others.empty()) return;
    write.other = draw.one_of(others);
    if (params_[write.other].is_slice) write.by = By::kSharded;
  }
  writes_.push_back(write);
}

at::Tensor ValueWrites::find(const Write& write, size_t param, const NamedTensors& registered) const {
  return chosen(write.by, registered, params_[param].name, params_[param].member);
}

void ValueWrites::apply(int step, Place place, const NamedTensors& registered) const {
  for (const auto& write : writes_)
    if (write.step == step && write.place == place) apply(write, registered);
}

void ValueWrites::apply(const Write& write, const NamedTensors& registered) const {
  const at::NoGradGuard no_grad;
  auto parameter = find(write, write.param, registered);
  const auto other = [&] { return find(write, write.other, registered); };
  switch (write.way) {
    case Way::kScale: parameter.mul_(0.75); break;
    case Way::kScaleData: parameter.data().mul_(0.75); break;
    case Way::kShiftData: parameter.data().add_(0.02); break;
    case Way::kScaleViewOfData: (parameter.dim() > 1 ? parameter.data().transpose(0, -1) : parameter.data()).mul_(0.75); break;
    case Way::kFillPartOfData: parameter.data().select(0, 0).fill_(0.3); break;
    case Way::kCopy: parameter.copy_(values_for(parameter, write.seed)); break;
    case Way::kCopyData: parameter.data().copy_(values_for(parameter, write.seed)); break;
    case Way::kSetData: parameter.set_data(values_for(parameter, write.seed)); break;
    case Way::kExchangeByCopy: {
      const auto values = parameter.clone();
      parameter.copy_(other());
      other().copy_(values);
      break;
    }
    case Way::kExchangeBySetData: {
      const auto values = parameter.detach().clone(), others = other().detach().clone();
      parameter.set_data(others);
      other().set_data(values);
      break;
    }
    case Way::kExchangeDataInPlace: {
      const auto values = parameter.data().clone();
      parameter.set_data(other().data());
      other().set_data(values);
      break;
    }
  }
}

}  // namespace fsdp::test
