#include "group/reduce/gradient_reduction.hpp"

#include <ATen/ATen.h>

#include "base/require.hpp"
#include "comm/poison.hpp"
#include "comm/scaled_sum.hpp"
#include "group/group_sanitizer.hpp"
#include "group/param_group.hpp"
#include "group/reduce/reduced_gradients.hpp"
#include "group/reduce/unreduced_gradients.hpp"
#include "param/residency.hpp"

namespace fsdp {

GradientReduction::GradientReduction(ParamGroup& group, bool is_behind_one) : GradientReduction(&group) {
  auto& trace = group.comm_ctx()->trace;
  const Range range(trace, "FSDP::post_backward_reduce", group.identity());
  const GroupBuffers buffers(group.parts(), "reduced gradients");
  BelowResidency below;
  collect();
  auto& comm = shard_comm();
  const auto slot = take_slot();
  int64_t begin = 0;
  for (auto& part : parts_) {
    divide_before(part);
    auto options = options_of(part);
    if (slot.defined()) options.memory = slot.narrow(0, std::exchange(begin, begin + part.slot_bytes), part.slot_bytes);
    part.reduce_scatter = pack_reduce_scatter(part.units, part.entries, options, group_->parts().launched_on(comm),
                                              group_->name());
    // Free the gradients now, not when the collective is done: where they were packed nothing
    // refers to them any more, and waiting would keep two groups' gradients alive at once.
    for (auto& entry : part.entries) {
      if (group_->parts().sanitizer != nullptr) poison_if_last(entry.gradient);
      entry.gradient.reset();
    }
  }
  is_beside_ = !is_behind_one && can_be_beside();
  if (SideStream::exists_on(group.config().device)) packed_on_ = current_stream(group.config().device);
}

/// By options alone: with all-reduces it decides the order of launches.
bool GradientReduction::can_be_beside() const {
  const auto& config = group_->config();
  const auto& reduction = group_->reduction();
  if (!SideStream::exists_on(config.device)) return false;
  if (reduction.all_reduce_hook || reduction.custom_reduce_scatter || !waits_in_streams()) return false;
  // Alone there is nothing to wait for but copies to the host.
  if (is_alone() && !config.host_memory) return false;
  // Partial sums go from backward to backward, and with them the stream that they were allocated on.
  if (has_all_reduce(*group_) && !reduction.requires_all_reduce) return false;
  for (size_t i = 0; i < group_->params().size(); ++i)
    if (group_->tally.partial_sum(i).defined()) return false;
  return true;
}

/// What would block the host or run a user's code waits for its turn instead, on the stream that computes.
bool GradientReduction::can_settle_beside() const {
  if (group_->classes() != nullptr) return false;  // they may let go of gradients that are a user's
  const auto& host_memory = group_->config().host_memory;
  if (host_memory && !host_memory->is_pinned) return false;
  const auto& params = group_->params();
  return std::none_of(params.begin(), params.end(), [&](const ShardedParam& param) {
    const auto registered = param.registered();
    return registered.defined() && (has_user_hooks(registered) || (host_memory && registered.grad().defined()));
  });
}

bool GradientReduction::waits_in_streams() const {
  const auto& info = group_->identity().mesh_info;
  return (info.shard_size() == 1 || shard_comm().waits_in_streams()) &&
         (info.replicate_size() == 1 || info.replicate_group->waits_in_streams());
}

int64_t GradientReduction::planned_slot_bytes(ParamGroup& group) {
  GradientReduction all(&group);
  for (const size_t i : group.layout().order()) {
    const auto& param = group.params()[i];
    if (param.handle().defined() && param.requires_grad()) all.add(i, {});
  }
  return all.measure();
}

int64_t GradientReduction::measure() {
  const auto& comm = group_->parts().launched_on(shard_comm());
  int64_t bytes = 0;
  for (auto& part : parts_)
    bytes += part.slot_bytes = packed_bytes(part.units, part.entries, options_of(part), comm);
  return bytes;
}

/// 1-D bytes for the parts one after another; undefined: there is no slot.
at::Tensor GradientReduction::take_slot() {
  if (!group_->reduces_in_slots()) return {};
  const int64_t bytes = measure();
  slot_ = group_->comm_ctx()->reduction_slots.hold(*group_, bytes);
  return slot_ ? slot_->take(bytes) : at::Tensor();
}

bool GradientReduction::hold_back_by(const ParamGroup& gathered) {
  auto& comm = shard_comm();
  auto* gather = gathered.unsharder().gather_under_way();
  // What a user's collective gives may depend on whether it is done, which differs by rank.
  const bool is_custom = group_->reduction().custom_reduce_scatter || gathered.unsharder().form().custom();
  if (gather == nullptr || parts_.empty() || is_custom || (comm.waits_in_streams() && !is_beside_)) return false;
  const auto beside =
      is_beside_ ? group_->comm_ctx()->reduce_scatter_stream.enter(group_->config().device) : SideStream::Entered();
  return gather->hold_back(comm);
}

void GradientReduction::launch() {
  auto& trace = group_->comm_ctx()->trace;
  const GroupBuffers buffers(group_->parts(), "reduced gradients");
  BelowResidency below;
  const auto device = group_->config().device;
  const auto beside = is_beside_ ? group_->comm_ctx()->reduce_scatter_stream.enter(device) : SideStream::Entered();
  auto& comm = shard_comm();
  for (auto& part : parts_) {
    trace.launch(call_of(part, Operation::kReduceScatter, comm), [&] {
      launch_reduce_scatter(part.reduce_scatter, options_of(part), group_->parts().launched_on(comm), group_->name());
    });
    if (slot_ && part.reduce_scatter.work) slot_->under_way.push_back(part.reduce_scatter.work);
    part.is_divided = part.reduce_scatter.is_scaled;
    trace.note_bytes(part.reduce_scatter.layout.total_bytes());
    auto& statistics = group_->comm_ctx()->meter.total();
    ++statistics.reductions;
    statistics.reduced_bytes += part.reduce_scatter.layout.total_bytes();
    statistics.communicated_bytes += (comm.size() - 1) * part.reduce_scatter.layout.rank_bytes();
  }
  if (is_beside_) run_beside();
}

/// On the stream of reduce-scatters, which those that come next wait for anyway; all-reduces, divisions and copies, which
/// they do not, go on another.
void GradientReduction::run_beside() {
  const auto device = group_->config().device;
  continue_behind_reduce_scatters();
  record(reduced_, current_stream(device));
  if (!can_settle_beside()) return;
  is_settled_ = true;
  if (!queues_more()) return settle();
  const auto behind = group_->comm_ctx()->post_reduce_stream.enter(device);
  settle();
  record(settled_, current_stream(device));
}

/// False: what the reduce-scatters gave becomes the gradients as it is.
bool GradientReduction::queues_more() const {
  if (is_partial_) return false;
  const auto& config = group_->config();
  if (!alone_.empty() || config.host_memory) return true;
  return std::any_of(parts_.begin(), parts_.end(), [&](const Part& part) {
    if (part.all_reduce || (!part.is_divided && division(part.dtype).after != 1)) return true;
    return std::any_of(part.indices.begin(), part.indices.end(), [&](size_t i) {
      const auto registered = group_->params()[i].registered();
      return registered.defined() &&
             (registered.grad().defined() || group_->gradient_dtypes().kept_dtype(i).value_or(part.dtype) != part.dtype);
    });
  });
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
  return group_->identity().mesh_info.data_parallel_size() == 1 && !group_->reduction().all_reduce_hook;
}

Communicator& GradientReduction::shard_comm() const { return *reduction_comm(*group_); }

CollectiveCall GradientReduction::call_of(const Part& part, Operation operation, Communicator& comm) const {
  CollectiveCall call{operation, group_->identity(), comm, /*bytes=*/0, part.dtype, /*params=*/0};
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
  plan_joint_dtype();
  for (const size_t i : group.layout().order()) {
    auto& param = group.params()[i];
    auto handle = param.handle();
    group.comm_ctx()->meter.total().buffer_bytes += bytes_to_take(group, i);
    auto gradient = handle.defined() ? take_gradient(group, i) : at::Tensor();
    const bool takes_part = gradient.defined() || group.tally.partial_sum(i).defined() ||
                            (group.reduction().reduces_unused_params && param.requires_grad());
    if (!takes_part || !handle.defined()) continue;
    if (alone) {
      if (!gradient.defined()) {
        gradient = at::zeros(param.sizes(), handle.options().requires_grad(false));
        group.comm_ctx()->meter.total().buffer_bytes += static_cast<int64_t>(gradient.nbytes());
      }
      if (!param.layout().is_whole()) gradient = param.layout().part_of(gradient, /*rank=*/0);
      const auto dtype = dtype_of(i, gradient);
      if (param.grad_dtype().takes_any() && gradient.scalar_type() != dtype) {
        gradient = gradient.to(dtype);
        group.comm_ctx()->meter.total().buffer_bytes += static_cast<int64_t>(gradient.nbytes());
      }
      alone_.emplace_back(i, std::move(gradient));
      continue;
    }
    add(i, std::move(gradient));
  }
}

/// Where gradients count as they are, and go together.
void GradientReduction::plan_joint_dtype() {
  auto& group = *group_;
  if (!group.gradient_dtypes().takes_any()) return;
  for (size_t i = 0; i < group.params().size(); ++i) {
    auto& param = group.params()[i];
    if (!group.gradient_dtypes().takes_any(i)) continue;
    require(!group.reduction().reduces_unused_params || !param.requires_grad(),
            "{}: with set_reduce_scatter_unused_params a grad_dtype of None leaves open in which dtype the ranks without a "
            "gradient reduce; set MixedPrecisionPolicy::reduce_dtype, or a grad_dtype",
            param.name());
    if (!group.gradient_dtypes().promotes()) continue;
    const auto handle = param.handle();
    for (const auto& gradient :
         {handle.defined() ? handle.grad() : at::Tensor(), group.tally.accumulated(i), group.tally.partial_sum(i)})
      if (gradient.defined())
        joint_dtype_ = at::promote_types(joint_dtype_.value_or(gradient.scalar_type()), gradient.scalar_type());
  }
  if (!joint_dtype_) return;
  for (size_t i = 0; i < group.params().size(); ++i)
    if (!group.gradient_dtypes().takes_any(i) && at::isFloatingType(group.gradient_dtypes().reduce_dtype(i)))
      joint_dtype_ = at::promote_types(*joint_dtype_, group.gradient_dtypes().reduce_dtype(i));
}

at::ScalarType GradientReduction::dtype_of(size_t index, const at::Tensor& gradient) const {
  auto own =
      group_->gradient_dtypes().reduce_dtype(index, gradient.defined() ? std::optional(gradient.scalar_type()) : std::nullopt);
  if (joint_dtype_) return at::isFloatingType(own) ? *joint_dtype_ : own;
  const auto& sum = group_->tally.partial_sum(index);  // not to be rounded, either
  return sum.defined() && group_->gradient_dtypes().takes_any(index) ? at::promote_types(own, sum.scalar_type()) : own;
}

void GradientReduction::add(size_t index, at::Tensor gradient) {
  const auto& param = group_->params()[index];
  const auto& layout = group_->layout();
  const auto dtype = dtype_of(index, gradient);
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
                           .start = layout.start_of(index),
                           .is_cast = param.param_dtype() != dtype});
}

void GradientReduction::advance() {
  if (std::exchange(advanced_, true)) return;
  BelowResidency below;
  if (is_beside_) {
    reduced_->block(*packed_on_);
  } else {
    group_->comm_ctx()->let_current_wait_for_reductions();  // sums that they have left
    continue_behind_reduce_scatters();
    if (packed_on_) let_wait_for_current(*packed_on_);
  }
  free_inputs();
}

void GradientReduction::continue_behind_reduce_scatters() {
  const auto& info = group_->identity().mesh_info;
  is_partial_ = info.replicate_size() > 1 && !group_->reduction().requires_all_reduce;
  auto& trace = group_->comm_ctx()->trace;
  for (auto& part : parts_) {
    trace.wait(Operation::kReduceScatter, group_->identity(), part.reduce_scatter.work);
    part.reduce_scatter.work.reset();
    if (!has_all_reduce(*group_)) continue;
    if (is_partial_) {
      store_partial_sums(part);
    } else {
      add_partial_sums(part);
      start_all_reduce(part);
    }
  }
}

/// What is packed next on the same stream takes their memory.
void GradientReduction::free_inputs() {
  const c10::OptionalStreamGuard on_theirs(packed_on_);
  for (auto& part : parts_) free_reduce_scatter_inputs(part.reduce_scatter);
  if (slot_) slot_->under_way.clear();
  slot_.reset();
}

void GradientReduction::start_all_reduce(Part& part) {
  const auto& info = group_->identity().mesh_info;
  // A hook on a mesh that does not replicate sums over ranks we know nothing of; ours all run it.
  auto& comm = info.replicate_group ? *info.replicate_group : *info.shard_group;
  if (group_->reduction().all_reduce_hook) return run_hook(part, comm);
  auto call = call_of(part, Operation::kAllReduce, comm);
  call.bytes = static_cast<int64_t>(part.reduce_scatter.output.nbytes());
  group_->comm_ctx()->meter.total().communicated_bytes += 2 * (comm.size() - 1) * call.bytes / comm.size();
  auto& launched = group_->parts().launched_on(comm);
  const auto scale = scale_in_collective(part);
  auto* scaled = scale ? scaled_sums_of(launched, part.dtype) : nullptr;
  part.is_divided = scaled != nullptr;
  const auto& sum = part.reduce_scatter.output;
  part.all_reduce = group_->comm_ctx()->trace.launch(call, [&] {
    return scaled != nullptr ? scaled->start_scaled_all_reduce(sum, *scale, group_->name())
                             : launched.start_all_reduce(sum, ReduceOp::kSum, group_->name());
  });
}

void GradientReduction::run_hook(Part& part, Communicator& comm) {
  const auto& input = part.hook_input = part.reduce_scatter.output;
  auto call = call_of(part, Operation::kAllReduce, comm);
  call.bytes = static_cast<int64_t>(input.nbytes());
  const AllReduceCall arguments{.gradients = input,
                                .replicate_group = group_->identity().mesh_info.replicate_group.get(),
                                .divide_factor = division(part.dtype).after,
                                .subject = group_->name()};
  auto result = group_->comm_ctx()->trace.launch(
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
  if (!is_settled_) {
    group_->comm_ctx()->let_current_wait_for_reductions();
    settle();
  }
  if (!settled_) return;
  // What this holds is given back to the stream that it was made for (Note [Streams of a root]).
  auto& comm_ctx = *group_->comm_ctx();
  if (group_->identity().mesh_info.shard_size() > 1)
    comm_ctx.reduce_scatter_stream.wait_for(*settled_);
  else
    settled_->block(*packed_on_);
}

/// Before it is cast too: what float32 holds need not fit into float16 whole.
void GradientReduction::divide_before(Part& part) const {
  const double factor = division(part.dtype).before;
  for (auto& entry : part.entries)
    if (entry.gradient.defined() && factor != 1) entry.gradient.div_(factor);
}

GradientDivision GradientReduction::division(at::ScalarType dtype) const {
  const int ranks = group_->identity().mesh_info.data_parallel_size();
  return gradient_division(group_->reduction().divide_factor.value_or(ranks), dtype);
}

const std::shared_ptr<Communicator>& reduction_comm(const ParamGroup& group) {
  const auto& config = group.reduction();
  return config.uses_separate_group ? config.separate_group : group.identity().mesh_info.shard_group;
}

bool has_all_reduce(const ParamGroup& group) {
  return group.identity().mesh_info.replicate_size() > 1 || group.reduction().all_reduce_hook;
}

}  // namespace fsdp
