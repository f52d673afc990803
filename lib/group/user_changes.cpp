#include "group/user_changes.hpp"

#include <algorithm>

namespace fsdp {

void UserChanges::validate() {
  const bool has_values = !parts_.config.device.is_meta();
  for (size_t i = 0; i < parts_.params.size(); ++i) {
    auto& param = parts_.params[i];
    param.unsharded.check(param.name());
    if (has_values) param.reset_sharded_param(parts_.shard.piece(i));
  }
  if (parts_.sanitizer && has_values) [[unlikely]]
    parts_.sanitizer->check_shards(parts_.params, parts_.shard.pieces());
}

void UserChanges::close_left() {
  notes_.left().close([&](size_t i) { return parts_.params[i].name(); });
}

void UserChanges::note_write(size_t index) {
  close_left();  // now: what it shows is no longer the parameter
  auto& params = parts_.params;
  if (index < params.size()) return params[index].note_write();
  for (const size_t member : parts_.local_shards->members(index - params.size())) {
    params[member].sharded.bump_version();  // the local shard counts by itself
    params[member].note_write();
  }
}

void UserChanges::sync_versions() {
  if (!parts_.has_writes()) return;
  notes_.optimizer().note_write();
  close_left();
  is_outdated_ = !parts_.is_never_released();
  for (auto& param : parts_.params) param.sync_version();
}

bool UserChanges::refresh_before_gather() {
  const bool was_stale = is_stale();
  if (was_stale) refresh();
  is_outdated_ = false;
  return was_stale;
}

void UserChanges::sync_requires_grad() {
  if (parts_.local_shards) parts_.local_shards->check_requires_grad(parts_.params);
  take_over_requires_grad();
}

void UserChanges::take_over_requires_grad() {
  bool has_changed = false;
  for (auto& param : parts_.params) has_changed |= param.sync_requires_grad();
  if (!has_changed) return;
  count_trainable();
  gradients_.dtypes.plan();
}

void UserChanges::sync_grad_dtypes() {
  bool has_changed = false;
  for (auto& param : parts_.params) has_changed |= param.sync_grad_dtype();
  if (parts_.local_shards) parts_.local_shards->check_grad_dtypes(parts_.params);  // in every step, until it is set back
  if (has_changed) gradients_.dtypes.plan();
}

void UserChanges::count_trainable() {
  gradients_.trainable_count = static_cast<size_t>(
      std::ranges::count_if(parts_.params, [](const FSDPParam& param) { return param.requires_grad(); }));
  notes_.trainable_changed();
}

}  // namespace fsdp
