#include "support/twin.hpp"

#include "support/twin_comparison.hpp"

namespace fsdp::test {

at::Tensor rows_of(const at::Tensor& full, int64_t index, int64_t ranks) {
  int64_t rows = full.size(0), chunk = (rows + ranks - 1) / ranks;
  int64_t begin = std::min(index * chunk, rows), end = std::min(begin + chunk, rows);
  return full.narrow(0, begin, end - begin);
}

at::Tensor local_elements(const at::Tensor& parameter, const at::Tensor& full) {
  if (!full.defined()) return full;
  const auto elements = full.reshape({-1});
  if (!is_fsdp_parameter(parameter)) return elements;
  std::vector<at::Tensor> parts{elements.narrow(0, 0, 0)};
  for (const auto& range : local_ranges(parameter)) parts.push_back(elements.narrow(0, range.begin, range.count()));
  return at::cat(parts);
}

Workload make_seeded(const MakeWorkload& make, const Training& training) {
  auto workload = seeded(training.seed, make);
  if (training.dtype != at::kFloat) workload.module->to(training.dtype);
  return workload;
}

std::unique_ptr<torch::optim::Optimizer> make_optimizer(const torch::nn::Module& module, const Training& training) {
  return make_adamw(module, training.weight_decay);
}

namespace {

std::vector<at::Tensor> cloned_buffers(const torch::nn::Module& module) {
  std::vector<at::Tensor> copies;
  for (auto& buffer : module.buffers()) copies.push_back(buffer.detach().clone());
  return copies;
}

void load_buffers(const torch::nn::Module& module, const std::vector<at::Tensor>& values) {
  at::NoGradGuard no_grad;
  auto buffers = module.buffers();
  for (size_t i = 0; i < buffers.size(); ++i) buffers[i].copy_(values[i]);
}

NamedTensors cloned_gradients(const NamedTensors& parameters) {
  NamedTensors copies;
  for (auto& [name, parameter] : parameters) {
    auto gradient = parameter.grad();
    if (gradient.defined() && gradient.is_sparse()) gradient = gradient.to_dense();
    copies.emplace_back(name, gradient.defined() ? gradient.clone() : at::Tensor());
  }
  return copies;
}

NamedTensors cloned_values(const NamedTensors& parameters) {
  NamedTensors copies;
  for (auto& [name, parameter] : parameters) copies.emplace_back(name, parameter.detach().clone());
  return copies;
}

int averaged_over(const Workload& workload, const Training& training, const at::Tensor& parameter) {
  return workload.averaged_over ? workload.averaged_over(parameter) : training.world_size;
}

void average_gradients(const Workload& workload, const NamedTensors& parameters, const Training& training) {
  at::NoGradGuard no_grad;
  for (auto& [name, parameter] : parameters) {
    if (!parameter.grad().defined()) {
      if (training.reduce_unused && parameter.requires_grad()) parameter.mutable_grad() = at::zeros_like(parameter);
      continue;
    }
    parameter.mutable_grad().div_(averaged_over(workload, training, parameter));
  }
}

/// The plain model once more, computing in param_dtype (16 bits) from the plain model's weights, as the sharded one
/// does: both round the same numbers in the same way, up to each rank's own gradients. These are added up here
/// in double, and there in the reduce dtype, which is all that may differ.
class LowTwin {
  /// A gradient that autograd makes in a wider dtype, and that is reduced in it, is not to be rounded on its way.
  void take_gradients_as_they_are_reduced() const {
    for (const auto& [name, parameter] : parameters_) {
      const auto reduced_in = gradient_dtypes(workload_, training_, parameter).reduced_in;
      const bool is_wider = c10::elementSize(reduced_in) > c10::elementSize(*training_.param_dtype);
      parameter.set_grad_dtype(is_wider ? std::nullopt : training_.param_dtype);
    }
  }

 public:
  LowTwin(const MakeWorkload& make, const Training& training)
      : training_(training), workload_(make_seeded(make, training)) {
    workload_.module->to(*training.param_dtype);
    parameters_ = unique_parameters(*workload_.module);
    sums_.resize(parameters_.size());
    magnitudes_.resize(parameters_.size());
  }

  const Workload& workload() const { return workload_; }

  void begin_step(int step, const NamedTensors& plain) {
    if (workload_.before_step) workload_.before_step(step);
    take_gradients_as_they_are_reduced();
    at::NoGradGuard no_grad;
    for (size_t i = 0; i < plain.size(); ++i) parameters_[i].second.copy_(plain[i].second);
  }

  /// After each backward.
  void add_gradients() {
    for (size_t i = 0; i < parameters_.size(); ++i) {
      auto& gradient = parameters_[i].second.mutable_grad();
      if (!gradient.defined()) continue;
      const auto term = gradient.to(at::kDouble);
      sums_[i] = sums_[i].defined() ? sums_[i] + term : term;
      magnitudes_[i] = magnitudes_[i].defined() ? magnitudes_[i] + term.abs() : term.abs();
      gradient.reset();
    }
  }

  /// The sums to the plain model; returns what they are made of.
  NamedTensors give_gradients(const Workload& to, const NamedTensors& plain) {
    NamedTensors magnitudes;
    for (size_t i = 0; i < plain.size(); ++i) {
      const auto& [name, parameter] = plain[i];
      const auto sum = std::exchange(sums_[i], {}), magnitude = std::exchange(magnitudes_[i], {});
      parameter.mutable_grad() = sum.defined() ? sum.to(parameter.scalar_type()) : sum;
      magnitudes.emplace_back(name, magnitude.defined() ? magnitude / averaged_over(to, training_, parameter)
                                                        : at::zeros_like(parameter, at::kDouble));
    }
    return magnitudes;
  }

 private:
  const Training& training_;
  Workload workload_;
  NamedTensors parameters_;
  std::vector<at::Tensor> sums_, magnitudes_;
};

std::shared_ptr<TrainingCode> code_of(const Workload& workload, const Training& training) {
  return workload.code ? workload.code : adamw_code(workload.module, training.weight_decay, training.max_norm);
}

at::Tensor number_of(const at::Tensor& penalty) {
  return penalty.defined() ? torch::tensor(penalty.item<double>(), at::kDouble) : penalty;
}

std::vector<TrainingCode::Kept> cloned(std::vector<TrainingCode::Kept> kept) {
  for (auto& one : kept)
    if (one.tensor.defined()) one.tensor = one.tensor.detach().clone();
  return kept;
}

/// Each rank's batches in turn, with that rank's own buffers.
void backward_of_all_ranks(const Workload& workload, TrainingCode& code, LowTwin* low, const Training& training,
                           std::vector<std::vector<at::Tensor>>& buffers, int step, PlainRecord::Step& now) {
  now.losses.resize(training.world_size);
  for (int rank = 0; rank < training.world_size; ++rank) {
    load_buffers(*workload.module, buffers[rank]);
    for (int micro = 0; micro < training.micro_batches; ++micro) {
      Inputs inputs(rank, step, micro, training.dtype, low != nullptr ? training.param_dtype : std::nullopt);
      auto loss = workload.loss(inputs);
      const auto penalty = code.penalty();
      (penalty.defined() ? loss + penalty : loss).backward();
      now.penalty = number_of(penalty);
      if (low != nullptr) low->add_gradients();
      now.losses[rank].push_back(loss.detach());
    }
    buffers[rank] = cloned_buffers(*workload.module);
  }
}

/// The size of the largest group cannot be asked; what is too small for it is refused.
void set_budget(FSDPModule& root, double factor) {
  for (int64_t bytes = 1;; bytes = bytes * 9 / 8 + 1) {
    try {
      root.set_unsharded_byte_budget(bytes);
    } catch (const UsageError&) {
      continue;
    }
    return root.set_unsharded_byte_budget(static_cast<int64_t>(factor * static_cast<double>(bytes)));
  }
}

void prepare_micro_batch(FSDPModule& root, const Training& training, int micro) {
  bool last = micro + 1 == training.micro_batches;
  switch (training.accumulation) {
    case Accumulation::kReduceEach: break;
    case Accumulation::kSyncAtLast: root.set_requires_gradient_sync(last); break;
    case Accumulation::kAllReduceLast: root.set_requires_all_reduce(last); break;
    case Accumulation::kLastBackward: root.set_is_last_backward(last); break;
  }
}

/// The gradients of what fully_shard was told to ignore are the user's to average.
void average_ignored(const Rank& rank, const NamedTensors& parameters, const Training& training) {
  at::NoGradGuard no_grad;
  for (auto& [name, parameter] : parameters) {
    if (is_fsdp_parameter(parameter) || !parameter.requires_grad()) continue;
    auto& gradient = parameter.mutable_grad();
    if (!gradient.defined() && training.reduce_unused) gradient = at::zeros_like(parameter);
    if (!gradient.defined()) continue;
    gradient = gradient.contiguous();
    rank.world()->start_all_reduce(gradient, ReduceOp::kSum, "an ignored parameter")->wait();
    gradient.div_(rank.size());
  }
}

/// How far one of the tensors has moved, by the measure of Rank::check_close.
double distance(const NamedTensors& from, const NamedTensors& to) {
  double most = 0;
  for (size_t i = 0; i < from.size() && i < to.size(); ++i) {
    const auto &a = from[i].second, &b = to[i].second;
    if (!a.defined() || !b.defined() || a.numel() == 0) continue;
    const auto moved = (a - b).abs().max().item<double>();
    most = std::max(most, moved / (a.abs().max().item<double>() + 0.02));
  }
  return most;
}

NamedTensors tensors_of(const std::vector<TrainingCode::Kept>& kept) {
  NamedTensors tensors;
  for (const auto& each : kept) tensors.emplace_back(each.name, each.tensor);
  return tensors;
}

PlainRecord train_plain(const MakeWorkload& make, const Training& training, bool starts_rounded) {
  auto workload = make_seeded(make, training);
  auto parameters = unique_parameters(*workload.module);
  const auto code = code_of(workload, training);
  code->before_sharding();
  code->start();
  if (starts_rounded) {
    at::NoGradGuard no_grad;
    auto draw = at::make_generator<at::CPUGeneratorImpl>(5);
    for (auto& [name, parameter] : parameters) {
      const auto units = torch::randint(-1, 2, parameter.sizes(), draw, at::TensorOptions(training.dtype));
      parameter.mul_(1 + segment_of(training.dtype) * units);
    }
  }
  std::optional<LowTwin> low;
  if (training.is_low()) low.emplace(make, training);
  const auto& computes = low ? low->workload() : workload;
  const auto penalises = low ? code_of(computes, training) : code;
  PlainRecord record;
  record.first_weights = cloned_values(parameters);
  record.buffers.assign(training.world_size, cloned_buffers(*workload.module));
  for (int step = 0; step < training.steps; ++step) {
    code->zero_grad();
    auto& now = record.steps.emplace_back();
    now.tolerance = now.kept_tolerance = training.tolerance();
    if (workload.before_step) now.before = workload.before_step(step);
    if (low) low->begin_step(step, parameters);
    backward_of_all_ranks(computes, *penalises, low ? &*low : nullptr, training, record.buffers, step, now);
    if (low) now.magnitudes = low->give_gradients(workload, parameters);
    average_gradients(workload, parameters, training);
    if (workload.after_average) workload.after_average();
    now.gradients = cloned_gradients(parameters);
    now.norm = code->clip();
    code->step();
    now.weights = cloned_values(parameters);
    now.kept = cloned(code->kept());
  }
  return record;
}

}  // namespace

PlainRecord train_plain(const MakeWorkload& make, const Training& training) {
  auto record = train_plain(make, training, /*starts_rounded=*/false);
  if (!training.is_delicate || training.is_low()) return record;
  const auto moved = train_plain(make, training, /*starts_rounded=*/true);
  // One draw of the roundings, of which the sharded model makes others and more: sums over ranks, in another order.
  constexpr double kMore = 16, kMost = 1e-6;
  for (size_t i = 0; i < record.steps.size(); ++i) {
    auto& step = record.steps[i];
    const double grown = std::max(distance(step.gradients, moved.steps[i].gradients),
                                  distance(step.weights, moved.steps[i].weights));
    step.tolerance = std::max(step.tolerance, std::min(kMore * grown, kMost));
    const double kept_grown = distance(tensors_of(step.kept), tensors_of(moved.steps[i].kept));
    step.kept_tolerance = std::max(step.tolerance, std::min(kMore * kept_grown, kMost));
  }
  return record;
}

namespace {

void compare_before(const Rank& rank, const std::vector<at::Tensor>& found, const PlainRecord::Step& expected, int step) {
  rank.check_equal(found.size(), expected.before.size(), fmt::format("step {}: number of evaluations", step));
  for (size_t i = 0; i < found.size() && i < expected.before.size(); ++i)
    rank.check_close(found[i], expected.before[i], fmt::format("step {}: evaluation before it", step), expected.tolerance);
}

}  // namespace

void train_sharded(Rank& rank, const MakeWorkload& make, const Training& training, const PlainRecord& plain) {
  auto workload = make_seeded(make, training);
  const bool has_own_mesh = workload.localize != nullptr;
  FullyShardOptions options{
      .mesh = has_own_mesh            ? DeviceMesh()
              : training.replicas > 0 ? rank.hybrid(training.replicas, training.shard_ranks())
                                      : rank.mesh(),
      .reshard_after_forward = training.reshard_after_forward,
      .mp_policy = {.param_dtype = training.param_dtype, .reduce_dtype = training.reduce_dtype,
                    .cast_forward_inputs = training.casts_inputs},
      .replicate_only = training.replicate_only};
  if (has_own_mesh) workload.localize(rank, options);
  if (training.adjust) training.adjust(options);
  const auto code = code_of(workload, training);
  code->before_sharding();
  workload.shard(options);
  code->start();
  const auto at_end = workload.watch ? workload.watch(rank) : std::function<void()>();
  auto top = roots(*workload.module);
  for (auto& root : top) {
    if (training.prefetch_distance != 1) root.set_prefetch_distance(training.prefetch_distance);
    if (training.reduce_unused) root.set_reduce_scatter_unused_params(true);
    if (training.separate_reductions) {
      root.set_separate_reduce_scatter_group();
      root.set_reduce_scatter_start(*training.separate_reductions);
    }
    if (training.budget_factor) set_budget(root, *training.budget_factor);
  }
  auto parameters = unique_parameters(*workload.module);
  compare_weights(rank, workload, training, parameters, plain.first_weights, training.tolerance(), "before the first step");
  const int place = rank.index() / training.tensor_ranks;  // tensor-parallel ranks see one batch
  for (int step = 0; step < training.steps; ++step) {
    auto& expected = plain.steps[step];
    code->zero_grad();
    if (workload.before_step) compare_before(rank, workload.before_step(step), expected, step);
    for (int micro = 0; micro < training.micro_batches; ++micro) {
      for (auto& root : top) prepare_micro_batch(root, training, micro);
      Inputs inputs(place, step, micro, training.dtype, training.param_dtype);
      auto loss = workload.loss(inputs);
      const auto penalty = code->penalty();
      (penalty.defined() ? loss + penalty : loss).backward();
      if (!training.is_low())
        rank.check_close(number_of(penalty), expected.penalty, fmt::format("step {}: penalty", step), expected.tolerance);
      rank.check_close(loss.detach(), expected.losses[place][micro], fmt::format("step {}: loss", step),
                       expected.tolerance);
    }
    average_ignored(rank, parameters, training);
    compare_gradients(rank, workload, training, parameters, expected, step);
    const auto norm = code->clip();
    rank.check_equal(norm.has_value(), expected.norm.has_value(), "it clips by a norm");
    if (norm && expected.norm)
      rank.check(std::abs(*norm - *expected.norm) <= expected.tolerance * *expected.norm,
                 fmt::format("step {}: norm: expected {}, found {}", step, *expected.norm, *norm));
    code->step();
    compare_kept(rank, workload, parameters, code->kept(), expected, step);
    compare_weights(rank, workload, training, parameters, expected.weights, expected.tolerance, fmt::format("step {}", step));
  }
  auto buffers = workload.module->buffers();
  for (size_t i = 0; i < buffers.size(); ++i)
    rank.check_close(buffers[i], plain.buffers[place][i], fmt::format("buffer {}", i), plain.steps.back().tolerance);
  if (at_end) at_end();
  compare_whole(rank, code->kept(), plain.steps.back());
}

bool trains_like_plain(const MakeWorkload& make, const Training& training) {
  auto plain = train_plain(make, training);
  return on_ranks(
      training.world_size * training.tensor_ranks,
      [&](Rank& rank) {
        try {
          train_sharded(rank, make, training, plain);
        } catch (const RefusedAsExpected&) {
        }
      },
      {.timeout = patience(),
       .launches_batches = training.launches_batches,
       .packs_below = training.packs_below});
}

}  // namespace fsdp::test
