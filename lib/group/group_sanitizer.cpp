#include "group/group_sanitizer.hpp"

#include <ATen/ATen.h>

#include "base/environment.hpp"
#include "base/require.hpp"
#include "base/stable_hash.hpp"
#include "comm/debug/late_delivery.hpp"
#include "comm/debug/late_streams.hpp"
#include "comm/debug/poison.hpp"
#include "dispatch/residency.hpp"
#include "group/comm_context.hpp"
#include "group/group_parts.hpp"

namespace fsdp {

namespace {

uint64_t hash_of(const at::Tensor& unsharded, const NamedBytes& param) {
  return content_hash(unsharded.narrow(0, param.begin, param.bytes));
}

}  // namespace

std::optional<SanitizerOptions> sanitizer_of_environment() {
  if (!environment::sanitizes()) return std::nullopt;
  return SanitizerOptions{.seed = static_cast<uint64_t>(environment::sanitizer_seed())};
}

GroupSanitizer::GroupSanitizer(const SanitizerOptions& options, int rank, c10::Device device)
    : options_(options),
      guard_{.faults = std::make_shared<FaultLog>(rank),
             .quarantine = Quarantine::shared(options.quarantine_bytes, device)},
      rank_(rank) {}

GroupSanitizer::~GroupSanitizer() { guard_.quarantine->check(guard_.faults.get()); }

Communicator& GroupSanitizer::late(Communicator& inner, const std::string& group) {
  auto& known = late_[&inner];
  if (!known) {
    // Delays of its own for each rank, group and mesh dimension, the same in every run.
    std::seed_seq seeds{options_.seed, static_cast<uint64_t>(rank_), stable_hash(group), stable_hash(inner.name())};
    const std::mt19937_64 random(seeds);
    // The fake backend writes no outputs: what was there stays.
    const bool has_streams =
        inner.device_type() != c10::DeviceType::CPU && inner.waits_in_streams() && inner.backend() != "fake";
    known = has_streams
                ? with_late_streams(inner.shared_from_this(), options_.max_delay, random)
                : with_late_delivery(inner.shared_from_this(),
                                     {.faults = guard_.faults, .max_delay = options_.max_delay, .random = random});
  }
  return *known;
}

void GroupSanitizer::note_shown(const at::Tensor& unsharded, std::vector<NamedBytes> params) {
  BelowResidency below;
  shown_.clear();
  for (const auto& param : params) shown_.push_back({param, hash_of(unsharded, param)});
  name_parts(unsharded, std::move(params));
}

void GroupSanitizer::note_write(const at::Tensor& unsharded, size_t index) {
  auto& shown = shown_[index];
  shown.hash = hash_of(unsharded, shown.param);
}

void GroupSanitizer::check_shown(const at::Tensor& unsharded) {
  BelowResidency below;
  for (const auto& [param, hash] : shown_) {
    if (hash_of(unsharded, param) == hash) continue;
    guard_.faults->add(
        fmt::format("parameter '{}': its unsharded values were changed without an operator that declares the write (through a "
                    "raw pointer, or by a kernel whose schema marks no write); the change is lost. Write with copy_ or another "
                    "operator",
                    param.name));
  }
  shown_.clear();
}

void GroupSanitizer::check_shards(std::span<const FSDPParam> params, std::span<const at::Tensor> pieces) {
  BelowResidency below;
  shards_.resize(params.size());
  for (size_t i = 0; i < params.size(); ++i) {
    const auto local_tensor = params[i].local_tensor();
    if (!local_tensor.defined()) continue;
    const auto version = params[i].sharded.version();
    const auto hash = content_hash(pieces[i]);
    auto& known = shards_[i];
    if (known.version == version && known.hash != hash)
      guard_.faults->add(
          fmt::format("parameter '{}': this rank's values were changed without an operator that declares the write (through a "
                      "raw pointer, or by a kernel whose schema marks no write), so they may not be gathered again. Write with "
                      "copy_ or another operator",
                      params[i].name()));
    known = {.hash = hash, .version = version};
  }
}

std::vector<std::string> GroupSanitizer::take_faults() {
  guard_.quarantine->check(guard_.faults.get());
  return guard_.faults->take();
}

GroupBuffers::GroupBuffers(const GroupParts& group, const char* what)
    : counted_(group.comm_ctx->meter.total().buffer_bytes) {
  if (group.sanitizer) [[unlikely]]
    guarded_.emplace(group.sanitizer->guard(), fmt::format("{} of '{}'", what, group.name()));
}

}  // namespace fsdp
