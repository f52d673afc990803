#include "group/gather/unsharder.hpp"

#include <ATen/ATen.h>

#include <utility>

#include "base/log.hpp"
#include "base/require.hpp"
#include "base/side_stream.hpp"
#include "collectives/buffer.hpp"
#include "dispatch/residency.hpp"
#include "group/comm_context.hpp"
#include "group/gather/unsharded_places.hpp"
#include "param/param_rows.hpp"

namespace fsdp {

void Unsharder::refuse(const char* error) const { throw StateError(fmt::format("{}: {}", parts_.name(), error)); }

void Unsharder::check_can_unshard() const {
  (void)next(UnshardEvent::kUnshard);
  const auto device = parts_.config.device, mesh_device = parts_.identity.mesh_info.mesh.device();
  if (device.type() == mesh_device.type()) return;  // before names of devices are made
  throw StateError(fmt::format("{}: its parameters are on {}, but its mesh communicates on {}; call fsdp::to(module, "
                               "device) before using it",
                               parts_.name(), device.str(), mesh_device.str()));
}

void Unsharder::rest() {
  const bool is_aliased = parts_.is_never_released() && !parts_.config.device.is_meta();
  enter(parts_.config.device.is_meta() ? UnshardState::kMeta
        : is_aliased                   ? UnshardState::kAliased
                                       : UnshardState::kSharded);
  if (!is_aliased) return;
  for (size_t i = 0; i < parts_.params.size(); ++i)
    if (auto* storage = parts_.params[i].unsharded.storage()) storage->fill(parts_.shard.piece(i).mutable_data_ptr());
}

void Unsharder::unshard(const Launch& launch) {
  const auto unsharding = next(UnshardEvent::kUnshard);
  if (unsharding == state_) return;
  BelowResidency below;
  const GroupBuffers buffers(parts_, "gathered parameters");
  const bool is_over_fewer = state_ == UnshardState::kShardedPostForward;
  if (auto made = is_over_fewer ? nullptr : inputs_.prepare(parts_)) set_encoded(std::move(made));
  memory_.set_is_slot(launch.slot != nullptr);
  auto& comm = is_over_fewer ? *post_forward_.group : parts_.shard_group();
  const auto* encoded = inputs_.encoded();
  const auto& layout = is_over_fewer ? post_forward_.layout : encoded ? encoded->layout() : parts_.layout.gathered();
  gather_ = parts_.comm_ctx->trace.launch(
      {Operation::kAllGather, parts_.identity, comm, layout.total_bytes(), parts_.params[0].spec.param_dtype}, [&] {
        const auto device = parts_.config.device;
        // What a gather after forward sends was written by the stream that computes.
        const auto beside = is_over_fewer ? SideStream::Entered()
                                          : parts_.comm_ctx->all_gather_stream.enter(
                                                device, parts_.config.host_memory && !encoded);
        // Only there: a stream that captures a graph may wait for nothing that came before the capture.
        if (beside.is_beside()) memory_.wait_for_last_use();
        try {
          auto gather = start_gather(launch);
          if (SideStream::exists_on(device)) memory_.note_launch(gather, owns_input(gather));
          return gather;
        } catch (...) {
          memory_.drop();
          throw;
        }
      });
  enter(unsharding);
  count_gather(comm);
}

void Unsharder::count_gather(Communicator& comm) {
  auto& meter = parts_.comm_ctx->meter;
  auto& statistics = meter.total();
  ++statistics.all_gathers;
  statistics.gathered_bytes += gather_.layout->total_bytes();
  statistics.communicated_bytes += (comm.size() - 1) * gather_.layout->rank_bytes();
  meter.add_unsharded(parts_.unsharded_bytes());
}

AllGather Unsharder::start_gather(const Launch& launch) {
  if (state_ == UnshardState::kShardedPostForward) return start_gather_of_post_forward_piece();
  if (launch.slot != nullptr) {
    memory_.drop_kept();  // of a time when it had to leave its slot
    const auto slot = launch.slot->take(parts_.slot_bytes());
    const auto& layout = parts_.layout.gathered();
    const auto tail = layout.has_tail()
                          ? slot.narrow(0, layout.total_bytes(), layout.tail_bytes() * layout.world_size())
                          : at::Tensor();
    return start_gather_of_shard({.unsharded = slot.narrow(0, 0, layout.total_bytes()), .tail = tail},
                                 launch.may_overlap_copies);
  }
  if (inputs_.encoded()) return start_encoded_gather(launch.may_overlap_copies);
  return start_gather_of_shard({memory_.take_kept(), {}}, launch.may_overlap_copies);
}

AllGather Unsharder::start_gather_of_shard(GatherMemory memory, bool may_overlap_copies) {
  const auto input = gather_input(parts_, may_overlap_copies);
  if (!sends_shard(input)) views_.inputs.clear();  // they are of another one
  try {
    return start_all_gather(parts_.layout.gathered(), input, call_over(parts_.shard_group()), std::move(memory), &views_);
  } catch (...) {
    let_go_of_views(sends_shard(input));
    throw;
  }
}

/// Behind a gather: the memory goes that its views show, but for the shard itself.
void Unsharder::let_go_of_views(bool keeps_inputs) {
  if (views_.outputs.tensors().empty()) return;  // it was launched without them
  views_.outputs.let_go();
  if (!keeps_inputs) views_.inputs.clear();
}

template <class Write>
AllGather Unsharder::start_packed_gather(const PieceLayout& layout, const GatherCall& call, Write&& write) {
  auto gather = prepare_packed_all_gather(layout, call, parts_.identity.mesh_info.mesh.device(), memory_.take_kept());
  write(gather.local);
  launch_all_gather(gather, call);
  return gather;
}

AllGather Unsharder::start_encoded_gather(bool may_overlap_copies) {
  auto pieces = parts_.shard.pieces();
  if (parts_.config.host_memory) {
    const auto shard = shard_on_device(parts_, may_overlap_copies);
    for (size_t i = 0; i < pieces.size(); ++i)
      pieces[i] = shard.narrow(0, parts_.layout.stored_offset(i), parts_.layout.stored_bytes(i));
  }
  const auto& encoded = *inputs_.encoded();
  return start_packed_gather(encoded.layout(), call_over(parts_.shard_group()),
                             [&](const at::Tensor& local) { encoded.write(parts_, pieces, local); });
}

AllGather Unsharder::start_gather_of_post_forward_piece() {
  const auto& [layout, piece, group] = post_forward_;
  const auto call = call_over(*group);
  if (!inputs_.custom()) return start_all_gather(layout, piece, call, {memory_.take_kept(), {}});
  return start_packed_gather(layout, call, [&sent = piece](const at::Tensor& local) { local.copy_(sent); });
}

/// One rank gathers nothing, and no user's collective does it.
GatherCall Unsharder::call_over(Communicator& comm) const {
  auto* custom = inputs_.encoded() ? inputs_.custom().get() : nullptr;
  return {.group = parts_.launched_on(comm), .subject = parts_.name(), .custom = custom};
}

at::Tensor Unsharder::finish_gather(AllGather gather) const {
  const auto* encoded = inputs_.encoded();
  if (encoded == nullptr || gather.layout != &encoded->layout()) return finish_all_gather(std::move(gather));
  if (gather.work) gather.work->wait();
  return encoded->read(parts_, gather);
}

void Unsharder::wait_for_unshard() {
  if (is_unsharded(state_)) return;
  const auto unsharded = next(UnshardEvent::kWaitForUnshard);
  BelowResidency below;
  auto& comm_ctx = *parts_.comm_ctx;
  auto gather = std::exchange(gather_, {});
  const bool sends_it = sends_shard(gather.local);
  try {
    comm_ctx.trace.wait(Operation::kAllGather, parts_.identity, gather.work);
    memory_.begin_arrival();
    gather.work.reset();
    let_go_of_views(sends_it);
    const Range copy_out(comm_ctx.trace, "FSDP::all_gather_copy_out", parts_.identity);
    const GroupBuffers buffers(parts_, "gathered parameters");
    show(finish_gather(std::move(gather)));
  } catch (...) {
    let_go_of_views(sends_it);
    memory_.drop();
    comm_ctx.meter.remove_unsharded(parts_.unsharded_bytes());
    enter(next(UnshardEvent::kGatherFails));
    throw;
  }
  // A piece that was kept after forward goes with this: as in FSDP2, what this backward gathers again comes from the shards.
  enter(unsharded);
  memory_.end_arrival();
}

void Unsharder::show(at::Tensor unsharded) {
  memory_.set(std::move(unsharded));
  auto* base = static_cast<char*>(memory_.bytes().mutable_data_ptr());
  for (size_t i = 0; i < parts_.params.size(); ++i) {
    if (!has_unsharded_memory(parts_, i)) continue;
    if (auto* storage = parts_.params[i].unsharded.storage()) storage->fill(base + parts_.layout.unsharded_offset(i));
  }
  if (!parts_.sanitizer) [[likely]]
    return;
  parts_.sanitizer->note_shown(memory_.bytes(), unsharded_places(parts_));
}

void Unsharder::hide() {
  if (parts_.sanitizer) [[unlikely]]
    parts_.sanitizer->check_shown(memory_.bytes());
  for (auto& param : parts_.params)
    if (auto* storage = param.unsharded.storage()) storage->release();
  inputs_.release();
  memory_.release();
}

void Unsharder::reshard() { release(UnshardEvent::kReshard); }

void Unsharder::release(UnshardEvent event) {
  const auto released = next(event);
  if (is_held() && released != UnshardState::kAliased) {
    auto& comm_ctx = *parts_.comm_ctx;
    const Range range(comm_ctx.trace, "FSDP::reshard", parts_.identity);
    comm_ctx.meter.remove_unsharded(parts_.unsharded_bytes());
    if (is_unsharding(state_))
      give_up_gather();
    else
      hide();
  }
  enter(released);
}

void Unsharder::reshard_after_forward(const std::shared_ptr<Communicator>& over) {
  if (state_ == UnshardState::kUnsharded) {
    if (!over) return release(UnshardEvent::kReshard);
    keep_post_forward_piece(over);
  }
  release(UnshardEvent::kReshardPostForward);
}

void Unsharder::keep_post_forward_piece(const std::shared_ptr<Communicator>& over) {
  BelowResidency below;
  memory_.begin_use();  // the current stream may be another group's
  const Range copy(parts_.comm_ctx->trace, "FSDP::post_forward_copy", parts_.identity);
  const GroupBuffers buffers(parts_, "parameters kept after forward");
  auto regrouped = parts_.layout.gathered().regrouped(over->size());
  post_forward_ = {.layout = inputs_.custom() ? regrouped.packed() : std::move(regrouped), .piece = {}, .group = over};
  auto& [layout, piece, group] = post_forward_;
  piece = make_buffer(layout.rank_bytes(), memory_.bytes().options()).zero_();
  for (size_t segment = 0; segment < layout.count(); ++segment) {
    const int64_t bytes = layout.piece_bytes(segment);
    const auto from = memory_.bytes().narrow(0, layout.tensor_offset(segment) + over->rank() * bytes, bytes);
    piece.narrow(0, layout.offset(segment), bytes).copy_(from);
  }
}

void Unsharder::drop_post_forward_piece() { enter(next(UnshardEvent::kDropPiece)); }

void Unsharder::give_up_gather() noexcept {
  // Unused. The communicator keeps the buffers until the collective is done; but a slot is to be free in the order of
  // streams, and a graph must not end with a stream that nobody waits for.
  try {
    parts_.comm_ctx->trace.note_given_up(Operation::kAllGather, parts_.identity);
    const bool is_waited_for = memory_.joins_in_capture(parts_.shard_group().waits_in_streams()) || memory_.is_slot();
    if (is_waited_for && gather_.work) gather_.work->wait();
  } catch (const std::exception& error) {
    log().info("{}: an all-gather that is no longer needed failed: {}", parts_.name(), error.what());
  }
  if (!sends_shard(gather_.local)) views_.inputs.clear();
  views_.outputs.drop();
  gather_ = {};
  memory_.drop();
}

void Unsharder::abandon() noexcept {
  if (!is_held() || state_ == UnshardState::kAliased) return;
  parts_.comm_ctx->meter.remove_unsharded(parts_.unsharded_bytes());
  if (is_unsharding(state_))
    give_up_gather();
  else
    memory_.drop();
  enter(UnshardState::kSharded);
}

void Unsharder::leave_slot() {
  if (!memory_.is_slot() || !is_held()) return;
  BelowResidency below;
  if (is_unsharding(state_)) wait_for_unshard();
  const GroupBuffers buffers(parts_, "gathered parameters");
  auto own = make_buffer(memory_.bytes().numel(), memory_.bytes().options());
  memory_.join_uses();
  own.copy_(memory_.bytes(), /*non_blocking=*/true);
  memory_.leave_slot();
  show(std::move(own));
}

void Unsharder::set_encoded(std::unique_ptr<EncodedGather> encoded) {
  inputs_.set_encoded(std::move(encoded));
  memory_.drop_kept();
  views_.inputs.clear();
}

void Unsharder::write_back(size_t index) {
  drop_post_forward_piece();
  if (state_ != UnshardState::kUnsharded || !has_unsharded_memory(parts_, index)) return;
  const auto& param = parts_.params[index];
  const auto& piece = parts_.shard.piece(index);
  const auto whole = memory_.bytes().narrow(0, parts_.layout.unsharded_offset(index), param.spec.unsharded_bytes());
  write_rows_back(param.spec, whole, piece, inputs_.encoded() ? inputs_.encoded()->shown(parts_, index, piece) : at::Tensor());
  if (parts_.sanitizer) [[unlikely]]
    parts_.sanitizer->note_write(memory_.bytes(), index);
}

}  // namespace fsdp
