#include "group/gradient_reduction.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "base/require.hpp"
#include "collectives/raw_view.hpp"
#include "comm/poison.hpp"
#include "comm/scaled_sum.hpp"
#include "group/dense_gradient.hpp"
#include "group/group_sanitizer.hpp"
#include "group/param_group.hpp"
#include "group/root_context.hpp"
#include "param/handle_keeper.hpp"
#include "param/residency.hpp"

namespace fsdp {

void GradientTally::note(size_t index) {
  if (has_[index]) return;
  has_[index] = true;
  ++count_;
}

bool GradientTally::is_complete(const ParamGroup& group) const {
  // Ranks may use different parameters then: no rank may start a reduction because its own are
  // complete, or the order of collectives would depend on the data.
  if (group.reduction().reduces_unused_params) return false;
  if (count_ == group.trainable_count()) return true;
  return count_ == expected_count_ && has_ == expected_;
}

void GradientTally::end_backward() {
  if (count_ > 0) {
    expected_ = has_;
    expected_count_ = count_;
  }
  has_.assign(has_.size(), false);
  count_ = 0;
  is_reduced = false;
}

void GradientTally::reset() {
  end_backward();
  expected_.clear();
  expected_count_ = 0;
}

namespace {

/// The whole gradient since the last reduction, taken off the handle; undefined if there is none.
at::Tensor take_gradient(ParamGroup& group, size_t index) {
  auto& param = group.params()[index];
  auto& fresh = param.handle().mutable_grad();
  auto& accumulated = group.tally.accumulated(index);
  auto gradient = dense_gradient(std::exchange(fresh, {}));
  if (!accumulated.defined()) return gradient;
  if (gradient.defined()) accumulated.add_(gradient);
  return std::exchange(accumulated, {});
}

/// LibTorch puts a user's first hook in the place of what was there, so counting them says nothing.
bool is_user_hook(const std::unique_ptr<torch::autograd::FunctionPreHook>& hook) {
  return dynamic_cast<const HandleKeeper*>(hook.get()) == nullptr;
}

bool has_user_hooks(const at::Tensor& registered) {
  const auto& hooks = torch::autograd::impl::hooks(registered);
  return std::any_of(hooks.begin(), hooks.end(), is_user_hook) ||
         torch::autograd::impl::post_acc_grad_hooks(registered) != nullptr;
}

/// What `take_gradient` allocates: before the CPU's kernel adds a gradient to a sum of another dtype, it
/// casts all of it.
int64_t bytes_to_take(ParamGroup& group, size_t index) {
  const auto& sum = group.tally.accumulated(index);
  if (!sum.defined() || !sum.is_cpu()) return 0;
  const auto handle = group.params()[index].handle();
  if (!handle.defined() || !handle.grad().defined()) return 0;
  return handle.grad().scalar_type() == sum.scalar_type() ? 0 : static_cast<int64_t>(sum.nbytes());
}

/// User hooks on a registered parameter, which autograd itself never reaches: they see the reduced gradient.
at::Tensor run_gradient_hooks(const at::Tensor& registered, at::Tensor gradient) {
  for (auto& hook : torch::autograd::impl::hooks(registered)) {
    if (!is_user_hook(hook)) continue;
    auto result = (*hook)({gradient});
    if (!result.empty() && result[0].defined()) gradient = result[0];
  }
  return gradient;
}

void run_post_accumulate_hook(const at::Tensor& registered) {
  if (auto& hook = torch::autograd::impl::post_acc_grad_hooks(registered)) (*hook)(registered);
}

}  // namespace

GradientReduction::GradientReduction(ParamGroup& group) : group_(&group) {
  auto& observer = group.context->observer();
  const Range range(observer, "FSDP::post_backward_reduce", group);
  const GroupBuffers buffers(group, "reduced gradients");
  BelowResidency below;
  collect();
  auto& comm = shard_comm();
  for (auto& part : parts_) {
    divide_before(part);
    part.reduce_scatter = pack_reduce_scatter(part.units, part.entries, options_of(part), group_->launched_on(comm),
                                              group_->name());
    group_->context->statistics().buffer_bytes += planned_bytes(part.reduce_scatter, part.entries);
    // Free the gradients now, not when the collective is done: where they were packed nothing
    // refers to them any more, and waiting would keep two groups' gradients alive at once.
    for (auto& entry : part.entries) {
      if (group_->sanitizer() != nullptr) poison_if_last(entry.gradient);
      entry.gradient.reset();
    }
  }
}

void GradientReduction::launch() {
  auto& observer = group_->context->observer();
  BelowResidency below;
  auto& comm = shard_comm();
  for (auto& part : parts_) {
    observer.launch(call_of(part, Operation::kReduceScatter, comm), [&] {
      launch_reduce_scatter(part.reduce_scatter, options_of(part), group_->launched_on(comm), group_->name());
    });
    part.is_divided = part.reduce_scatter.is_scaled;
    observer.note_bytes(part.reduce_scatter.layout.total_bytes());
    auto& statistics = group_->context->statistics();
    ++statistics.reductions;
    statistics.reduced_bytes += part.reduce_scatter.layout.total_bytes();
    statistics.communicated_bytes += (comm.size() - 1) * part.reduce_scatter.layout.rank_bytes();
  }
}

ReduceScatterOptions GradientReduction::options_of(const Part& part) const {
  return {.sum = at::TensorOptions().dtype(part.dtype).device(group_->config().device),
          .custom = group_->reduction().custom_reduce_scatter.get(),
          .scale = has_all_reduce(*group_) ? std::nullopt : scale_in_collective(part)};
}

/// The last collective of a part can do what is left to divide; one before it would have to be as often there.
std::optional<double> GradientReduction::scale_in_collective(const Part& part) const {
  const auto [before, after] = division(part.dtype);
  // A division in two parts keeps sums in float16's range, which a product rounded to it does not (T7).
  if (group_->reduction().forces_sum || before != 1 || after == 1) return std::nullopt;
  return 1 / after;
}

/// One rank and nobody else to ask: gradients stay where they are.
bool GradientReduction::is_alone() const {
  return group_->config().mesh_info.data_parallel_size() == 1 && !group_->reduction().all_reduce_hook;
}

Communicator& GradientReduction::shard_comm() const {
  const auto& config = group_->reduction();
  return config.uses_separate_group ? *config.separate_group : *group_->config().mesh_info.shard_group;
}

CollectiveCall GradientReduction::call_of(const Part& part, Operation operation, Communicator& comm) const {
  CollectiveCall call{operation, *group_, comm, /*bytes=*/0, part.dtype, /*params=*/0};
  for (const size_t i : part.indices) {
    call.bytes += c10::multiply_integers(group_->params()[i].sizes());
    call.params |= uint64_t{1} << std::min<size_t>(i, 63);
  }
  call.bytes *= static_cast<int64_t>(c10::elementSize(part.dtype));
  return call;
}

void GradientReduction::collect() {
  auto& group = *group_;
  const bool alone = is_alone();
  for (const size_t i : group.layout().order()) {
    auto& param = group.params()[i];
    auto handle = param.handle();
    group.context->statistics().buffer_bytes += bytes_to_take(group, i);
    auto gradient = handle.defined() ? take_gradient(group, i) : at::Tensor();
    const bool takes_part = gradient.defined() || group.tally.partial_sum(i).defined() ||
                            (group.reduction().reduces_unused_params && param.requires_grad());
    if (!takes_part || !handle.defined()) continue;
    if (alone) {
      if (!gradient.defined()) {
        gradient = at::zeros(param.sizes(), handle.options().requires_grad(false));
        group.context->statistics().buffer_bytes += static_cast<int64_t>(gradient.nbytes());
      }
      if (!param.layout().is_whole()) gradient = param.layout().part_of(gradient, /*rank=*/0);
      alone_.emplace_back(i, std::move(gradient));
      continue;
    }
    add(i, std::move(gradient));
  }
}

void GradientReduction::add(size_t index, at::Tensor gradient) {
  const auto& param = group_->params()[index];
  const auto& layout = group_->layout();
  const auto dtype = group_->reduce_dtype(index);
  auto part = std::find_if(parts_.begin(), parts_.end(),
                           [&](const Part& known) { return known.dtype == dtype; });
  if (part == parts_.end()) {
    parts_.emplace_back();
    part = std::prev(parts_.end());
    part->dtype = dtype;
  }
  const size_t unit = layout.unit_of(index);
  const bool is_new_unit = part->indices.empty() || layout.unit_of(part->indices.back()) != unit;
  if (is_new_unit) part->units.push_back({layout.piece_numel(unit)});
  part->indices.push_back(index);
  part->entries.push_back({.gradient = std::move(gradient),
                           .layout = &param.layout(),
                           .unit = part->units.size() - 1,
                           .start = layout.start_of(index)});
}

void GradientReduction::advance() {
  if (std::exchange(advanced_, true)) return;
  BelowResidency below;
  const auto& info = group_->config().mesh_info;
  is_partial_ = info.replicate_size() > 1 && !group_->reduction().requires_all_reduce;
  auto& observer = group_->context->observer();
  for (auto& part : parts_) {
    observer.wait(Operation::kReduceScatter, *group_, part.reduce_scatter.work);
    finish_reduce_scatter(part.reduce_scatter);
    if (!has_all_reduce(*group_)) continue;
    if (is_partial_) {
      store_partial_sums(part);
    } else {
      add_partial_sums(part);
      start_all_reduce(part);
    }
  }
}

void GradientReduction::start_all_reduce(Part& part) {
  const auto& info = group_->config().mesh_info;
  // A hook on a mesh that does not replicate sums over ranks we know nothing of; ours all run it.
  auto& comm = info.replicate_group ? *info.replicate_group : *info.shard_group;
  if (group_->reduction().all_reduce_hook) return run_hook(part, comm);
  auto call = call_of(part, Operation::kAllReduce, comm);
  call.bytes = static_cast<int64_t>(part.reduce_scatter.output.nbytes());
  group_->context->statistics().communicated_bytes += 2 * (comm.size() - 1) * call.bytes / comm.size();
  auto& launched = group_->launched_on(comm);
  const auto scale = scale_in_collective(part);
  auto* scaled = scale ? scaled_sums_of(launched, part.dtype) : nullptr;
  part.is_divided = scaled != nullptr;
  const auto& sum = part.reduce_scatter.output;
  part.all_reduce = group_->context->observer().launch(call, [&] {
    return scaled != nullptr ? scaled->start_scaled_all_reduce(sum, *scale, group_->name())
                             : launched.start_all_reduce(sum, ReduceOp::kSum, group_->name());
  });
}

void GradientReduction::run_hook(Part& part, Communicator& comm) {
  const auto& input = part.hook_input = part.reduce_scatter.output;
  auto call = call_of(part, Operation::kAllReduce, comm);
  call.bytes = static_cast<int64_t>(input.nbytes());
  const AllReduceCall arguments{.gradients = input,
                                .replicate_group = group_->config().mesh_info.replicate_group.get(),
                                .divide_factor = division(part.dtype).after,
                                .subject = group_->name()};
  auto result = group_->context->observer().launch(
      call, [&] { return group_->reduction().all_reduce_hook(arguments); });
  const auto& output = result.gradients;
  require(output.defined() && output.dim() == 1 && output.numel() == input.numel() && output.is_contiguous() &&
              output.device() == input.device() && at::isFloatingType(output.scalar_type()),
          "{}: the all-reduce hook returned {}; expected one dimension of {} floating-point elements on {}, "
          "contiguous",
          group_->name(), output.defined() ? output.toString() : "no tensor", input.numel(), input.device().str());
  part.reduce_scatter.output = std::move(result.gradients);
  part.all_reduce = std::move(result.work);
  part.is_divided = true;
}

void GradientReduction::finish() {
  advance();
  if (is_partial_) return;
  BelowResidency below;
  if (auto* classes = group_->classes()) {
    group_->wait_for_copies();
    classes->take_changes(*group_);
  }
  const double factor_alone = division(at::kFloat).after;
  for (auto& [index, gradient] : alone_) {
    if (factor_alone != 1) gradient.div_(factor_alone);
    assign(index, std::move(gradient));
  }
  for (auto& part : parts_) {
    if (part.all_reduce)
      group_->context->observer().wait(Operation::kAllReduce, *group_, part.all_reduce);
    // A division, not a multiplication by the inverse, which would round thirds twice.
    if (const double factor = division(part.dtype).after; factor != 1 && !part.is_divided)
      part.reduce_scatter.output.div_(factor);
    for (size_t i = 0; i < part.indices.size(); ++i)
      assign(part.indices[i], local_piece(part, i));
  }
}

/// Before it is cast too: what float32 holds need not fit into float16 whole.
void GradientReduction::divide_before(Part& part) const {
  const double factor = division(part.dtype).before;
  for (auto& entry : part.entries)
    if (entry.gradient.defined() && factor != 1) entry.gradient.div_(factor);
}

GradientDivision GradientReduction::division(at::ScalarType dtype) const {
  const int ranks = group_->config().mesh_info.data_parallel_size();
  return gradient_division(group_->reduction().divide_factor.value_or(ranks), dtype);
}

at::Tensor GradientReduction::local_piece(const Part& part, size_t i) const {
  const size_t index = part.indices[i];
  const auto& layout = group_->params()[index].layout();
  const int rank = group_->config().mesh_info.shard_rank();
  const auto piece = reduced_piece(part.reduce_scatter, part.entries[i].unit,
                                   group_->layout().local_start(index), layout.local_numel(rank));
  return raw_view(piece, layout.local_sizes(rank), layout.local_strides(rank), piece.storage_offset());
}

void GradientReduction::add_partial_sums(Part& part) {
  for (size_t i = 0; i < part.indices.size(); ++i) {
    auto& sum = group_->tally.partial_sum(part.indices[i]);
    if (sum.defined()) local_piece(part, i).add_(sum);
    sum.reset();
  }
}

void GradientReduction::store_partial_sums(Part& part) {
  for (size_t i = 0; i < part.indices.size(); ++i) {
    auto& sum = group_->tally.partial_sum(part.indices[i]);
    const auto piece = local_piece(part, i);
    if (sum.defined())
      sum.add_(piece);
    else
      sum = piece;
  }
}

void GradientReduction::assign(size_t index, at::Tensor gradient) {
  const auto& param = group_->params()[index];
  const auto registered = param.registered();
  if (!registered.defined()) return;  // nobody is left to use it
  if (gradient.scalar_type() != registered.scalar_type() &&
      !group_->config().mp_policy.keep_low_precision_grads)
    gradient = gradient.to(registered.scalar_type());
  auto& present = registered.mutable_grad();
  auto* classes = group_->classes();
  if (classes && !classes->is_trainable(index)) classes = nullptr;  // frozen since it got this gradient
  const bool is_first = !present.defined() && !has_user_hooks(registered);
  // What the host is to read now cannot be on its way.
  if (!is_first) group_->wait_for_copies();
  gradient = group_->bring_home(gradient, is_first ? HomeCopies::Pace::kOverlapped : HomeCopies::Pace::kBlocking,
                                is_first && classes ? classes->place(*group_, index) : at::Tensor());
  gradient = run_gradient_hooks(registered, std::move(gradient));
  if (present.defined()) {
    require_state(present.sizes() == registered.sizes(),
                  "{}: its gradient was replaced by one of sizes {}, but this rank's rows have "
                  "sizes {}; assign this rank's rows, or reset it",
                  param.name(), fmt::join(present.sizes(), "x"),
                  fmt::join(registered.sizes(), "x"));
    present.add_(gradient);
  } else {
    present = std::move(gradient);
  }
  if (classes) classes->settle(*group_, index);
  run_post_accumulate_hook(registered);
}

bool has_all_reduce(const ParamGroup& group) {
  return group.config().mesh_info.replicate_size() > 1 || group.reduction().all_reduce_hook;
}

bool has_unreduced_gradients(ParamGroup& group) {
  for (size_t i = 0; i < group.params().size(); ++i) {
    const auto handle = group.params()[i].handle();
    if (handle.defined() && handle.grad().defined()) return true;
    if (group.tally.accumulated(i).defined()) return true;
    if (group.tally.partial_sum(i).defined() && group.reduction().requires_all_reduce) return true;
  }
  return false;
}

void accumulate_in_reduce_dtype(ParamGroup& group) {
  BelowResidency below;
  for (size_t i = 0; i < group.params().size(); ++i) {
    const auto& param = group.params()[i];
    const auto dtype = group.reduce_dtype(i);
    const auto handle = param.handle();
    if (dtype == param.param_dtype() || !handle.defined() || !handle.grad().defined()) continue;
    group.tally.accumulated(i) = take_gradient(group, i).to(dtype);
  }
}

void drop_unreduced_gradients(ParamGroup& group) {
  for (size_t i = 0; i < group.params().size(); ++i) {
    if (const auto handle = group.params()[i].handle(); handle.defined())
      handle.mutable_grad().reset();
    group.tally.partial_sum(i).reset();
    group.tally.accumulated(i).reset();
  }
}

}  // namespace fsdp
