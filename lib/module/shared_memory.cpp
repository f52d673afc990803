#include "module/shared_memory.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <string>
#include <unordered_map>

#include "base/log.hpp"
#include "base/require.hpp"
#include "module/shows_own_parameters.hpp"
#include "param/left_storage.hpp"
#include "tensor/strides.hpp"

namespace fsdp {

namespace {

/// A parameter or a buffer, and the bytes of its storage that it lies in.
struct InStorage {
  at::Tensor tensor;
  const std::string* name;
  bool leaves;  ///< fully_shard gives it memory of its own
  bool is_python = false;
  int64_t begin = 0, end = 0;
};

using ByStorage = std::unordered_map<const c10::StorageImpl*, std::vector<InStorage>>;

void add(ByStorage& all, InStorage one) {
  const auto& tensor = one.tensor;
  if (tensor.is_meta() || !tensor.has_storage() || tensor.numel() == 0) return;
  int64_t last = tensor.storage_offset();
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) last += (tensor.size(dim) - 1) * tensor.stride(dim);
  const auto itemsize = static_cast<int64_t>(tensor.element_size());
  one.begin = tensor.storage_offset() * itemsize;
  one.end = (last + 1) * itemsize;
  all[tensor.storage().unsafeGetStorageImpl()].push_back(std::move(one));
}

/// One rank's parameter stays where it is, unless it is kept in another form.
bool leaves_its_memory(const at::Tensor& param, const ParamTarget& place, const FullyShardOptions& options) {
  const auto& policy = options.mp_policy;
  const auto own = param.scalar_type();
  const bool is_cast = policy.param_dtype_override || policy.param_dtype.value_or(own) != own;
  return place.mesh_info.shard_size() > 1 || options.offload_policy || is_cast || !is_dense(param.sizes(), param.strides());
}

/// Some element of one is an element of the other, not only of the stretch that it lies in.
bool have_common_bytes(const InStorage& one, const InStorage& other) {
  const int64_t begin = std::min(one.begin, other.begin), end = std::max(one.end, other.end);
  const auto marks = at::zeros({end - begin}, at::kByte);
  const auto bytes_of = [&](const InStorage& in) {
    auto sizes = in.tensor.sizes().vec();
    auto strides = in.tensor.strides().vec();
    const auto itemsize = static_cast<int64_t>(in.tensor.element_size());
    for (auto& stride : strides) stride *= itemsize;
    sizes.push_back(itemsize);
    strides.push_back(1);
    return marks.as_strided(sizes, strides, in.begin - begin);
  };
  bytes_of(one).fill_(1);
  return bytes_of(other).any().item<bool>();
}

bool are_dense(const InStorage& one, const InStorage& other) {
  return is_dense(one.tensor.sizes(), one.tensor.strides()) && is_dense(other.tensor.sizes(), other.tensor.strides());
}

void refuse(const InStorage& one, const InStorage& other) {
  const auto text = fmt::format(
      "'{}' and '{}' show the same memory (by set_data, or as views of one tensor). Sharded, each has memory of its own, so "
      "that a write to one no longer shows in the other",
      *one.name, *other.name);
  if (one.is_python || other.is_python) return warn_once(text + "; hold one parameter in both places");
  throw UsageError("fully_shard: " + text +
                   ". Let both places hold one tensor, or give one of them a copy (clone)");
}

}  // namespace

void refuse_shared_memory(const ManagedStates& states, const std::vector<ParamTarget>& places,
                          const FullyShardOptions& options) {
  ByStorage all;
  for (size_t i = 0; i < states.params.size(); ++i) {
    const auto& param = states.params[i];
    if (param.tied) continue;  // its memory is a group's already
    const bool is_python = dynamic_cast<const ShowsOwnParameters*>(param.registrations.front().module) != nullptr;
    const bool leaves = leaves_its_memory(param.unsharded_param, places[i], options);
    const auto keeper = leaves ? keeper_of_memory(param.unsharded_param) : std::string();
    const InStorage own{param.unsharded_param, &param.name, leaves, is_python};
    if (!keeper.empty()) refuse(own, {{}, &keeper, /*leaves=*/false, is_python});
    add(all, own);
  }
  for (const auto& buffer : states.buffers) add(all, {buffer.tensor, &buffer.name, /*leaves=*/false});
  const at::NoGradGuard no_grad;
  for (auto& [storage, tensors] : all) {
    std::ranges::stable_sort(tensors, {}, &InStorage::begin);
    for (size_t i = 0; i < tensors.size(); ++i)
      for (size_t j = i + 1; j < tensors.size() && tensors[j].begin < tensors[i].end; ++j) {
        if (!tensors[i].leaves && !tensors[j].leaves) continue;
        if (are_dense(tensors[i], tensors[j]) || have_common_bytes(tensors[i], tensors[j])) refuse(tensors[i], tensors[j]);
      }
  }
}

}  // namespace fsdp
