#include "group/param_group.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/variable.h>

#include "base/log.hpp"
#include "base/require.hpp"
#include "base/side_stream.hpp"
#include "collectives/buffer.hpp"
#include "group/gradient_hook.hpp"
#include "group/group_sanitizer.hpp"
#include "group/root_context.hpp"
#include "param/residency.hpp"

namespace fsdp {

namespace {

GroupLayout lay_out(std::span<const LayoutParam> params, const GroupConfig& config, const Communicator& group) {
  if (!config.cut_like) return GroupLayout(params, config.layout, group);
  std::vector<GroupLayout::Itemsizes> itemsizes;
  for (const auto& param : params) itemsizes.push_back({param.stored_itemsize, param.gathered_itemsize});
  return config.cut_like->with_itemsizes(itemsizes, group);
}

}  // namespace

ParamGroup::ParamGroup(GroupIdentity own_identity, GroupConfig config, const std::vector<GroupParam>& params)
    : tally(params.size()), identity(std::move(own_identity)), config_(std::move(config)) {
  BelowResidency below;
  const auto& info = identity.mesh_info;
  std::vector<LayoutParam> laid;
  for (const auto& param : params) laid.push_back(layout_param(param));
  layout_ = lay_out(laid, config_, *info.shard_group);
  for (size_t i = 0; i < params.size(); ++i) {
    const auto& param = params[i];
    identity.params.push_back(param.name);
    params_.emplace_back(param.name, param.handle, param.param_dtype, layout_.shard(i), info.shard_rank());
    if (param.held) {
      params_.back().take_identity(param.held->group->params_[param.held->index]);
      taken_.push_back({i, *param.held});
    }
    output_dtypes_.push_back(param.output_dtype);
    extensions_.push_back(param.extension);
    spreads_.push_back(param.spread);
    asked_dtypes_.push_back(param.has_param_dtype ? std::optional(param.param_dtype) : std::nullopt);
    is_cast_ |= params_.back().is_cast();
  }
  set_casts_operands(config_.mp_policy.param_dtype && config_.mp_policy.cast_forward_inputs);
  set_follows_mode(config_.mp_policy.full_precision_in_eval);
  make_pieces();
  wire_ = make_wire(layout_, dtypes());
  count_trainable();
  plan_gradient_dtypes();
  if (config_.sanitizer)
    sanitizer_ = std::make_unique<GroupSanitizer>(*config_.sanitizer, info.world_rank(), info.mesh.device());
}

c10::Device ParamGroup::home_device() const {
  return config_.home && !config_.device.is_meta() ? c10::Device(at::kCPU) : config_.device;
}

/// Zeros, in the home of what is used on `device`. Between pieces lie alignment gaps: they travel, so
/// they are defined.
at::Tensor ParamGroup::make_shard(int64_t bytes, c10::Device device) const {
  const bool is_home = config_.home && !device.is_meta();
  return at::zeros({bytes}, is_home ? config_.home->options(at::kByte)
                                    : at::TensorOptions().dtype(at::kByte).device(device));
}

/// The shard with this rank's parts, and the registered parameters on top of it.
void ParamGroup::make_pieces() {
  for (const auto& param : params_)
    pieces_.push_back(config_.home ? at::Tensor() : param.own_memory(config_.device));
  for (const auto& taken : taken_) pieces_[taken.index] = piece_of(taken);
  const bool all_alias = std::all_of(pieces_.begin(), pieces_.end(),
                                     [](const at::Tensor& piece) { return piece.defined(); });
  if (!all_alias) shard_ = make_shard(layout_.stored().rank_bytes(), config_.device);
  for (size_t i = 0; i < params_.size(); ++i) {
    const bool is_new = !pieces_[i].defined();
    if (is_new) pieces_[i] = shard_.narrow(0, layout_.stored_offset(i), layout_.stored_bytes(i));
    if (params_[i].is_taken()) continue;  // its registered parameter is another group's still
    if (is_new && !params_[i].handle().is_meta()) params_[i].copy_part_to(pieces_[i], params_[i].handle().detach());
    params_[i].make_registered(link_, i, pieces_[i]);
  }
  copy_taken_pieces();
}

void ParamGroup::move_pieces(GroupLayout layout, at::Tensor shard) {
  std::vector<at::Tensor> pieces;
  for (size_t i = 0; i < params_.size(); ++i) {
    pieces.push_back(shard.narrow(0, layout.stored_offset(i), layout.stored_bytes(i)));
    // What a parameter left behind in a flat run is padding from now on: zero.
    if (!shard.is_meta() && !params_[i].is_vacant()) pieces[i].narrow(0, 0, pieces_[i].numel()).copy_(pieces_[i]);
  }
  set_layout(std::move(layout));
  shard_ = std::move(shard);
  pieces_ = std::move(pieces);
  for (size_t i = 0; i < params_.size(); ++i)
    if (params_[i].registered().defined()) params_[i].make_registered(link_, i, pieces_[i]);
}

ParamGroup::~ParamGroup() {
  if (context) {
    std::lock_guard lock(context->mutex());
    if (is_gathering()) give_up_gather();
    try {
      if (is_unsharded_) let_memory_wait();
      context->remove(*this);
    } catch (const std::exception& error) {
      log().error("{}: the end of a sharded module: {}", name(), error.what());
    }
  }
  *link_ = nullptr;
}

void ParamGroup::note_first_values() {
  if (identity.mesh_info.data_parallel_size() == 1 || config_.device.is_meta()) return;
  BelowResidency below;
  first_values_ = std::make_unique<FirstValues>();
  for (const auto& param : params_)
    first_values_->add(param.is_taken() ? at::Tensor() : param.handle(), param.version());
}

void ParamGroup::attach() {
  auto self = shared_from_this();
  const auto all_taken = std::exchange(taken_, {});
  for (const auto& taken : all_taken) take(taken);
  for (size_t i = 0; i < params_.size(); ++i) {
    auto& param = params_[i];
    const auto handle = param.handle();
    // One rank's memory may go on as its piece: then nothing was copied out.
    const auto* own = handle.has_storage() ? handle.storage().unsafeGetStorageImpl() : nullptr;
    if (pieces_[i].defined() && pieces_[i].storage().unsafeGetStorageImpl() != own) left_.note(handle, i);
    take_over_gradient(param, identity.mesh_info.shard_rank());
    param.take_over_handle(self, i, config_.device);
    install_gradient_hook(handle, self, i);
  }
  plan_gradient_dtypes();
  show_pieces();
  for (const auto& taken : all_taken) taken.from.group->close_gaps();
}

/// Where nothing is ever released, handles show this rank's pieces; elsewhere nothing yet.
void ParamGroup::show_pieces() {
  is_unsharded_ = is_never_released() && !config_.device.is_meta();
  for (size_t i = 0; i < params_.size() && is_unsharded_; ++i)
    if (auto* storage = params_[i].storage()) storage->fill(pieces_[i].mutable_data_ptr());
}

void ParamGroup::rename(std::string name, const std::vector<std::string>& param_names) {
  identity.name = std::move(name);
  identity.params = param_names;
  for (size_t i = 0; i < params_.size(); ++i) params_[i].rename(param_names[i]);
}

void ParamGroup::unshard() {
  if (is_held()) return;
  require_state(!config_.device.is_meta(),
                "{}: its parameters are on the meta device and have no values to gather; "
                "call fsdp::materialize on the module before using it",
                identity.name);
  require_state(config_.device.type() == identity.mesh_info.mesh.device().type(),
                "{}: its parameters are on {}, but its mesh communicates on {}; call fsdp::to(module, "
                "device) before using it",
                identity.name, config_.device.str(), identity.mesh_info.mesh.device().str());
  BelowResidency below;
  if (is_stale()) {
    take_changes();
    drop_post_forward_shard();  // made of values from before the write
  }
  needs_gather_ = false;
  const GroupBuffers buffers(*this, "gathered parameters");
  const bool is_regathered = post_forward_.shard.defined();
  is_in_slot_ = uses_slots() && !is_regathered &&
                comm_ctx->gather_slots.prepare(*this, context->options().prefetch_distance);
  const int64_t buffer_bytes = planned_gather_bytes(is_regathered);
  auto& comm = is_regathered ? *policy_.after_forward.post_forward_group : *identity.mesh_info.shard_group;
  gather_ = comm_ctx->trace.launch(
      {Operation::kAllGather, identity, comm, travelling(is_regathered).total_bytes(), params_[0].param_dtype()},
      [&] {
        // What a gather after forward sends was written by the stream that computes.
        const auto beside = is_regathered ? SideStream::Entered()
                                          : comm_ctx->all_gather_stream.enter(config_.device, config_.home && !wire_);
        // Only there: a stream that captures a graph may wait for nothing that came before the capture.
        if (beside.is_beside() && kept_.defined()) released_->block(current_stream(config_.device));
        auto gather = start_gather(launched_on(comm), is_regathered);
        note_launch();
        return gather;
      });
  auto& statistics = comm_ctx->meter.total();
  ++statistics.all_gathers;
  statistics.gathered_bytes += gather_.layout->total_bytes();
  statistics.communicated_bytes += (comm.size() - 1) * gather_.layout->rank_bytes();
  statistics.buffer_bytes += buffer_bytes - unpacked_bytes(gather_);
  context->note_held(*this);
}

void ParamGroup::wait_for_unshard() {
  if (is_unsharded_) return;
  require_state(is_gathering(), "{}: wait_for_unshard without unshard", name());
  BelowResidency below;
  try {
    auto gather = std::exchange(gather_, {});
    comm_ctx->trace.wait(Operation::kAllGather, identity, gather.work);
    wait_for_launch();
    gather.work.reset();
    const Range copy_out(comm_ctx->trace, "FSDP::all_gather_copy_out", identity);
    const GroupBuffers buffers(*this, "gathered parameters");
    comm_ctx->meter.total().buffer_bytes += unpacked_bytes(gather);
    const bool is_regathered = gather.layout == &post_forward_.layout;
    show(finish_gather(std::move(gather)));
    // As FSDP2: what is gathered again in this backward comes from the shards.
    if (is_regathered) drop_post_forward_shard();
    let_memory_wait();  // of what was sent
  } catch (...) {
    context->note_released(*this);
    throw;
  }
}

at::Tensor ParamGroup::bring_home(const at::Tensor& gradient, HomeCopies::Pace pace, const at::Tensor& target) {
  if (!config_.home && !target.defined()) return gradient;
  const Range range(comm_ctx->trace, "FSDP::gradient_copy", identity);
  auto& statistics = comm_ctx->meter.total();
  auto home = target;
  if (!home.defined()) {
    home = at::empty_strided(gradient.sizes(), gradient.strides(), config_.home->options(gradient.scalar_type()));
    statistics.buffer_bytes += static_cast<int64_t>(home.nbytes());
  }
  if (config_.home) statistics.offloaded_bytes += static_cast<int64_t>(gradient.nbytes());
  copies_.copy(gradient, home, copy_pace(pace == HomeCopies::Pace::kOverlapped));
  return home;
}

void ParamGroup::show(at::Tensor unsharded) {
  unsharded_ = std::move(unsharded);
  auto* base = static_cast<char*>(unsharded_.mutable_data_ptr());
  for (size_t i = 0; i < params_.size(); ++i)
    if (auto* storage = params_[i].storage()) storage->fill(base + layout_.unsharded_offset(i));
  is_unsharded_ = true;
  if (sanitizer_) [[unlikely]]
    note_shown();
}

void ParamGroup::note_shown() {
  std::vector<NamedBytes> shown;
  for (size_t i = 0; i < params_.size(); ++i)
    shown.push_back({layout_.unsharded_offset(i), params_[i].unsharded_bytes(), params_[i].name()});
  sanitizer_->note_shown(unsharded_, std::move(shown));
}

Communicator& ParamGroup::launched_on(Communicator& comm) const {
  return sanitizer_ ? sanitizer_->late(comm, name()) : comm;
}

void ParamGroup::reshard() {
  release();
  drop_post_forward_shard();
}

void ParamGroup::release() {
  mark_not_ready();
  holds.end(HoldEvent::kReleased);
  if (is_never_released() || !is_held()) return;
  const Range range(comm_ctx->trace, "FSDP::reshard", identity);
  context->note_released(*this);
  if (is_gathering()) {
    give_up_gather();
    return;
  }
  if (sanitizer_) [[unlikely]]
    sanitizer_->check_shown(unsharded_);
  for (auto& param : params_)
    if (auto* storage = param.storage()) storage->release();
  if (keeps_storage_ && !is_in_slot_) {
    kept_ = std::move(unsharded_);
    if (SideStream::exists_on(config_.device)) record(released_, current_stream(config_.device));
  }
  unsharded_.reset();
  let_memory_wait();
  is_unsharded_ = false;
}

void ParamGroup::reshard_after_forward() {
  const auto& group = policy_.after_forward.post_forward_group;
  if (group && is_unsharded_ && !post_forward_.shard.defined() && !is_stale()) {
    BelowResidency below;
    post_forward_.layout = layout_.gathered().regrouped(group->size());
    const auto& pieces = post_forward_.layout;
    const Range copy(comm_ctx->trace, "FSDP::post_forward_copy", identity);
    const GroupBuffers buffers(*this, "parameters kept after forward");
    post_forward_.shard = make_buffer(pieces.rank_bytes(), unsharded_.options()).zero_();
    comm_ctx->meter.total().buffer_bytes += pieces.rank_bytes();
    for (size_t unit = 0; unit < pieces.count(); ++unit)
      post_forward_.shard.narrow(0, pieces.offset(unit), pieces.piece_bytes(unit))
          .copy_(unsharded_.narrow(
              0, pieces.tensor_offset(unit) + group->rank() * pieces.piece_bytes(unit),
              pieces.piece_bytes(unit)));
  }
  release();
}

bool ParamGroup::was_changed() const {
  return std::any_of(params_.begin(), params_.end(),
                     [](const ShardedParam& param) { return param.was_changed(); });
}

void ParamGroup::follow_versions() {
  if (!was_changed()) return;
  was_written_ |= reductions_before_write_ > 0;  // before, it has got its first values
  needs_gather_ = !is_never_released();
  for (auto& param : params_) param.follow_version();
}

bool ParamGroup::sync_requires_grad() {
  if (classes_) classes_->check_requires_grad(*this);
  bool changed = false;
  for (auto& param : params_) changed |= param.sync_requires_grad();
  if (!changed) return false;
  count_trainable();
  plan_gradient_dtypes();
  return true;
}

void ParamGroup::count_trainable() {
  trainable_count_ = static_cast<size_t>(std::count_if(
      params_.begin(), params_.end(), [](const auto& param) { return param.requires_grad(); }));
  has_notes_ = true;
}

void ParamGroup::audit() {
  for (size_t i = 0; i < params_.size(); ++i) {
    params_[i].check_handle();
    if (!config_.device.is_meta()) params_[i].bring_home(pieces_[i]);
  }
  if (is_between_steps()) sync_grad_dtypes();
  if (sanitizer_ && !config_.device.is_meta()) [[unlikely]]
    sanitizer_->check_shards(params_, pieces_);
}

void ParamGroup::note_reduction() {
  const int limit = config_.warn_after_reductions;
  if (was_written_ || reductions_before_write_ >= limit) return;
  if (++reductions_before_write_ == limit)
    warn_once(fmt::format(
        "'{}': gradients were reduced in {} backwards, but no optimizer has written the parameters. One "
        "that was built before fully_shard holds the wrong tensors; build it afterwards, or call "
        "fsdp::adopt(optimizer)",
        params_[0].name(), limit));
}

void ParamGroup::make_resident(std::span<ResidencyOwner* const> owners, const OperatorUse& use) {
  // One operator may touch groups of several roots; each root sees its own.
  c10::SmallVector<ParamGroup*, 4> waiting;
  for (auto* owner : owners) waiting.push_back(static_cast<ParamGroup*>(owner));
  while (!waiting.empty()) {
    const auto root = waiting.front()->context;
    c10::SmallVector<ParamGroup*, 4> mine, others;
    for (auto* group : waiting) (group->context == root ? mine : others).push_back(group);
    root->touch({mine.data(), mine.size()}, use);
    waiting = std::move(others);
  }
}

void ParamGroup::carry_write(size_t index) {
  const auto root = context;
  std::lock_guard lock(root->mutex());
  BelowResidency below;
  drop_post_forward_shard();
  auto& param = params_[index];
  if (!is_never_released() && is_unsharded_) {
    const auto whole = unsharded_.narrow(0, layout_.unsharded_offset(index), param.unsharded_bytes());
    param.write_back(whole, pieces_[index],
                     wire_ ? wire_->shown(wire_group(), index, pieces_[index]) : at::Tensor());
    if (sanitizer_) [[unlikely]]
      sanitizer_->note_write(unsharded_, index);
  }
  // Outside a step the ranks may have written different values (each its own random numbers); the
  // version that moves makes the next touch gather what all of them hold. Within a step
  // the handle stays as written, or autograd would refuse a legal write before a use.
  if (root->in_step() || is_never_released())
    param.note_own_write();
  else
    param.bump_version();
}

void ParamGroup::take_over_requires_grad(size_t index) {
  const auto root = context;
  std::lock_guard lock(root->mutex());
  // Most often nothing has changed: so this one is looked at before all of the group.
  const bool has_changed = index >= params_.size() || params_[index].has_new_requires_grad();
  if (has_changed && !root->in_step()) sync_requires_grad();
}

bool ParamGroup::is_in_scope() const { return context->is_in_scope(); }

void ParamGroup::handle_storage_gone(size_t index) noexcept { params_[index].storage_gone(); }

}  // namespace fsdp
