#include <ATen/ATen.h>

#include "base/log.hpp"
#include "base/require.hpp"
#include "base/side_stream.hpp"
#include "collectives/buffer.hpp"
#include "collectives/packed_gather.hpp"
#include "group/group_sanitizer.hpp"
#include "group/param_group.hpp"
#include "group/root_context.hpp"
#include "param/residency.hpp"

// In which form a group travels, and through what: as its shard lies, or packed in one buffer, encoded by
// extensions or gathered by a user's own collective. What this rank sends, and whose streams' memory it takes.
namespace fsdp {

void ParamGroup::check_extensions(const std::vector<at::ScalarType>& dtypes) const {
  for (size_t i = 0; i < params_.size(); ++i) {
    const auto& extension = extensions_[i];
    if (!extension) continue;
    require(config_.layout != ParamLayout::kFlat,
            "{}: all_gather_extension_fn gave '{}', but the flat layout's pieces hold parts of several "
            "parameters; use ParamLayout::kPerParameter, or give null",
            params_[i].name(), extension->name());
    require(extension->accepts(dtypes[i]), "{}: all-gather extension '{}' does not take {}; give null for it",
            params_[i].name(), extension->name(), c10::toString(dtypes[i]));
  }
}

std::unique_ptr<WireGather> ParamGroup::make_wire(const GroupLayout& layout,
                                                  std::vector<at::ScalarType> dtypes) const {
  check_extensions(dtypes);
  const int world = identity.mesh_info.shard_size();
  const bool is_encoded = std::any_of(extensions_.begin(), extensions_.end(),
                                      [](const auto& extension) { return extension != nullptr; });
  // One rank gathers nothing, so nothing is rounded either (M3).
  if (world == 1 || (!is_encoded && !custom_all_gather_)) return nullptr;
  return std::make_unique<WireGather>(layout, extensions_, std::move(dtypes), world);
}

std::vector<at::ScalarType> ParamGroup::dtypes() const {
  std::vector<at::ScalarType> dtypes;
  for (const auto& param : params_) dtypes.push_back(param.dtype());
  return dtypes;
}

void ParamGroup::set_layout(GroupLayout layout) {
  wire_ = make_wire(layout, dtypes());
  layout_ = std::move(layout);
  kept_.reset();
  sent_.clear();
}

void ParamGroup::set_custom_all_gather(std::shared_ptr<AllGatherComm> comm) {
  custom_all_gather_ = std::move(comm);
  wire_ = make_wire(layout_, dtypes());
}

void ParamGroup::set_keep_unsharded_storage(bool keep) {
  keeps_storage_ = keep;
  if (!keep) kept_.reset();
}

const PieceLayout& ParamGroup::travelling(bool is_regathered) const {
  if (is_regathered) return post_forward_.layout;
  return wire_ ? wire_->layout() : layout_.gathered();
}

void ParamGroup::set_symmetric_memory(bool value) {
  has_symmetric_memory_ = value;
  kept_.reset();
  if (value) return;
  comm_ctx->gather_slots.remove(*this);
  comm_ctx->reduction_slots.remove(*this);
}

bool ParamGroup::uses_slots() const {
  return has_symmetric_memory_ && !wire_ && identity.mesh_info.shard_size() > 1;
}

bool ParamGroup::reduces_in_slots() const {
  return has_symmetric_memory_ && !reduction_.custom_reduce_scatter && identity.mesh_info.shard_size() > 1;
}

void ParamGroup::note_launch() {
  launched_on_.reset();
  unpacked_on_.reset();
  if (!SideStream::exists_on(config_.device)) return;
  launched_on_ = current_stream(config_.device);
  record(launched_, *launched_on_);
}

/// One rank's gather is copies alone: its work waits for nothing.
void ParamGroup::wait_for_launch() {
  if (!launched_on_) return;
  unpacked_on_ = current_stream(config_.device);
  if (*launched_on_ != *unpacked_on_) launched_->block(*unpacked_on_);
}

/// What the last gather has allocated is freed here: see Note [Streams of a root]. If it was launched from another stream
/// than it is used on, that is: a stream that was the current one outside a graph's capture is not to come into it.
void ParamGroup::let_memory_wait() const {
  if (launched_on_ && unpacked_on_ && *launched_on_ != *unpacked_on_) let_wait_for_current(*launched_on_);
}

/// This rank's pieces where they are used; undefined where every one is memory of its own.
at::Tensor ParamGroup::shard_on_device() {
  if (!config_.home) return shard_;
  auto shard = make_buffer(shard_.numel(), at::TensorOptions().dtype(at::kByte).device(config_.device));
  // Within a step whoever writes the shard on the host waits for gradients first; after a read nobody does.
  copies_.copy(shard_, shard, copy_pace(!is_between_steps()));
  auto& statistics = comm_ctx->meter.total();
  statistics.offloaded_bytes += shard_.numel();
  statistics.buffer_bytes += shard_.numel();
  return shard;
}

/// What this rank sends: on the device, in the dtypes and in the order that are gathered.
at::Tensor ParamGroup::gather_input() {
  auto shard = shard_on_device();
  if (!is_cast_ && !layout_.is_repacked()) return shard;
  comm_ctx->meter.total().buffer_bytes += layout_.gathered().rank_bytes();
  return pack(shard);
}

/// shard: undefined where every piece is memory of its own.
at::Tensor ParamGroup::pack(const at::Tensor& shard) const {
  const auto gathered = make_buffer(layout_.gathered().rank_bytes(),
                                    at::TensorOptions().dtype(at::kByte).device(config_.device));
  for (size_t i = 0; i < params_.size(); ++i) {
    const auto piece = shard.defined() ? shard.narrow(0, layout_.stored_offset(i), layout_.stored_bytes(i)) : pieces_[i];
    params_[i].cast_piece(piece, gathered.narrow(0, layout_.gathered_offset(i), layout_.gathered_bytes(i)));
  }
  return gathered;
}

GatherMemory ParamGroup::slot_memory() {
  const auto slot = comm_ctx->gather_slots.take(*this);
  const auto& layout = layout_.gathered();
  return {.unsharded = slot.narrow(0, 0, layout.total_bytes()),
          .tail = layout.has_tail() ? slot.narrow(0, layout.total_bytes(), layout.tail_bytes() * layout.world_size())
                                    : at::Tensor()};
}

void ParamGroup::leave_slot() {
  if (!is_in_slot_ || !is_held()) return;
  BelowResidency below;
  if (is_gathering()) wait_for_unshard();
  const GroupBuffers buffers(*this, "gathered parameters");
  auto own = make_buffer(unsharded_.numel(), unsharded_.options());
  own.copy_(unsharded_, /*non_blocking=*/true);
  comm_ctx->meter.total().buffer_bytes += own.numel();
  show(std::move(own));
  if (unpacked_on_) unpacked_on_ = current_stream(config_.device);
  is_in_slot_ = false;
}

void ParamGroup::give_up_gather() noexcept {
  // Unused. The communicator keeps the buffers until the collective is done; but a slot is to be free in the order of
  // streams.
  try {
    comm_ctx->trace.note_given_up(Operation::kAllGather, identity);
    if (is_in_slot_ && gather_.work) gather_.work->wait();
  } catch (const std::exception& error) {
    log().info("{}: its gather was given up, and failed: {}", name(), error.what());
  }
  gather_ = {};
}

AllGather ParamGroup::start_gather_of_shard(Communicator& comm, GatherMemory memory) {
  const auto input = gather_input();
  return start_all_gather(layout_.gathered(), input, comm, name(), std::move(memory),
                          input.is_same(shard_) ? &sent_ : nullptr);
}

AllGather ParamGroup::start_gather(Communicator& comm, bool is_regathered) {
  if (is_in_slot_) {
    kept_.reset();  // of a time when it had to leave its slot
    return start_gather_of_shard(comm, slot_memory());
  }
  const bool is_packed = is_regathered ? custom_all_gather_ != nullptr : wire_ != nullptr;
  auto kept = std::exchange(kept_, {});
  if (!is_packed)
    return is_regathered
               ? start_all_gather(post_forward_.layout, post_forward_.shard, comm, name(), {std::move(kept), {}})
               : start_gather_of_shard(comm, {std::move(kept), {}});
  const PackedGatherOptions options{.group = comm,
                                    .subject = name(),
                                    .custom = custom_all_gather_.get(),
                                    .memory = at::TensorOptions().device(identity.mesh_info.mesh.device()),
                                    .unsharded = std::move(kept)};
  if (is_regathered)
    return start_packed_all_gather(post_forward_.layout, options,
                                   [&](const at::Tensor& part) { part.copy_(post_forward_.shard); });
  auto pieces = pieces_;
  if (config_.home) {
    const auto shard = shard_on_device();
    for (size_t i = 0; i < pieces.size(); ++i)
      pieces[i] = shard.narrow(0, layout_.stored_offset(i), layout_.stored_bytes(i));
  }
  return start_packed_all_gather(wire_->layout(), options,
                                 [&](const at::Tensor& part) { wire_->write(wire_group(), pieces, part); });
}

at::Tensor ParamGroup::finish_gather(AllGather gather) const {
  if (!gather.is_packed) return finish_all_gather(std::move(gather));
  if (wire_ && gather.layout == &wire_->layout()) {
    if (gather.work) gather.work->wait();
    return wire_->read(wire_group(), gather);
  }
  return finish_packed_all_gather(std::move(gather));
}

int64_t ParamGroup::planned_gather_bytes(bool is_regathered) const {
  if (is_in_slot_) return 0;
  const auto& layout = travelling(is_regathered);
  const int64_t kept = kept_bytes();
  if (is_regathered && custom_all_gather_) return layout.total_bytes() + unsharded_bytes() - kept;
  if (is_regathered || !wire_) return layout.gather_bytes() - kept;
  return layout.total_bytes() + unsharded_bytes() - kept + wire_->scratch_bytes();
}

int64_t ParamGroup::unpacked_bytes(const AllGather& gather) const {
  const bool is_wire = wire_ && gather.layout == &wire_->layout();
  return (gather.unsharded.defined() ? 0 : unsharded_bytes()) + (is_wire ? wire_->scratch_bytes() : 0);
}

}  // namespace fsdp
