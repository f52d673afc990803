#include "group/gather/all_gather_inputs.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "base/require.hpp"
#include "collectives/buffer.hpp"
#include "group/comm_context.hpp"
#include "param/param_rows.hpp"

namespace fsdp {

AllGatherInputs::AllGatherInputs(Extensions extensions) : extensions_(std::move(extensions)) { find_prepared(); }

void AllGatherInputs::find_prepared() {
  prepared_.clear();
  for (const auto& extension : extensions_)
    if (auto* prepared = dynamic_cast<PreparedExtension*>(extension.get())) prepared_.push_back(prepared);
}

void AllGatherInputs::set_extension(size_t index, std::shared_ptr<AllGatherExtension> extension) {
  extensions_[index] = std::move(extension);
  find_prepared();
}

std::unique_ptr<EncodedGather> AllGatherInputs::prepare(const GroupParts& parts) const {
  if (!encoded_ || prepared_.empty()) return nullptr;
  for (auto* extension : prepared_) extension->prepare();
  auto made = plan(parts, parts.layout, stored_dtypes(parts));
  return made->has_sizes_of(*encoded_) ? nullptr : std::move(made);
}

void AllGatherInputs::release() const noexcept {
  for (auto* extension : prepared_) extension->release();
}

namespace {

void check_extensions(const Extensions& extensions, const GroupParts& parts, const std::vector<at::ScalarType>& dtypes) {
  for (size_t i = 0; i < parts.params.size(); ++i) {
    const auto& extension = extensions[i];
    if (!extension) continue;
    require(parts.config.layout != ParamLayout::kFlat,
            "{}: all_gather_extension_fn gave '{}', but the flat layout's pieces hold parts of several "
            "parameters; use ParamLayout::kPerParameter, or give null",
            parts.params[i].name(), extension->name());
    require(extension->accepts(dtypes[i]), "{}: all-gather extension '{}' does not take {}; give null for it",
            parts.params[i].name(), extension->name(), c10::toString(dtypes[i]));
  }
}

}  // namespace

void AllGatherInputs::check(const GroupParts& parts, const std::vector<at::ScalarType>& dtypes) const {
  check_extensions(extensions_, parts, dtypes);
}

std::unique_ptr<EncodedGather> AllGatherInputs::plan(const GroupParts& parts, const GroupLayout& layout,
                                                std::vector<at::ScalarType> dtypes) const {
  return plan_with(terms(), parts, layout, std::move(dtypes));
}

std::unique_ptr<EncodedGather> AllGatherInputs::plan_with(Terms terms, const GroupParts& parts, const GroupLayout& layout,
                                                     std::vector<at::ScalarType> dtypes) {
  check_extensions(terms.extensions, parts, dtypes);
  const int world = parts.identity.mesh_info.shard_size();
  const bool is_encoded = std::ranges::any_of(terms.extensions, [](const auto& extension) { return extension != nullptr; });
  // One rank gathers nothing, so nothing is rounded either.
  if (world == 1 || (!is_encoded && terms.custom == nullptr)) return nullptr;
  return std::make_unique<EncodedGather>(layout, std::move(terms.extensions), std::move(dtypes), world);
}

std::vector<at::ScalarType> stored_dtypes(const GroupParts& parts) {
  std::vector<at::ScalarType> dtypes;
  for (const auto& param : parts.params) dtypes.push_back(param.spec.dtype);
  return dtypes;
}

at::Tensor shard_on_device(GroupParts& parts, bool may_overlap) {
  if (!parts.config.host_memory) return parts.shard.bytes();
  const auto& rows = parts.shard.bytes();
  auto shard = make_buffer(rows.numel(), at::TensorOptions().dtype(at::kByte).device(parts.config.device));
  parts.shard.copy(rows, shard, may_overlap);
  parts.comm_ctx->meter.total().offloaded_bytes += shard.numel();
  return shard;
}

at::Tensor gather_input(GroupParts& parts, bool may_overlap) {
  auto shard = shard_on_device(parts, may_overlap);
  const auto& layout = parts.layout;
  if (!parts.is_cast && !layout.is_repacked()) return shard;
  auto gathered = make_buffer(layout.gathered().rank_bytes(),
                              at::TensorOptions().dtype(at::kByte).device(parts.config.device));
  for (size_t i = 0; i < parts.params.size(); ++i) {
    // One rank's may be memory of its own, beside a shard of those that are not.
    const auto piece = parts.config.host_memory ? shard.narrow(0, layout.stored_offset(i), layout.stored_bytes(i))
                                                : parts.shard.piece(i);
    cast_rows(parts.params[i].spec, piece, gathered.narrow(0, layout.gathered_offset(i), layout.gathered_bytes(i)));
  }
  return gathered;
}

}  // namespace fsdp
