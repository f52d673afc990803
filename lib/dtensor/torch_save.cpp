#include <ATen/ATen.h>
#include <ATen/ops/set_ops.h>
#include <torch/library.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <set>

#include "base/require.hpp"
#include "base/stable_hash.hpp"
#include "dtensor/whole_storage.hpp"
#include "tensor/strides.hpp"

// Note [Saves in another order]
// LibTorch writes an optimizer's state in the order of addresses, which differ by rank: each rank would give its part of
// another tensor. So ranks first tell each other what they are about to write: all over whose groups one of them may be, as
// some parameters are cut over other dimensions of a mesh than others. They call a tensor by its name, sizes and dtype, and by
// its place among the copies and `*_like` of one parameter, which all ranks make in the same order. If they differ, all gather
// each of the tensors that some rank writes, in one order, and every rank keeps its own. So W ranks may gather each tensor W
// times. Meshes that have no group in common do not know of each other: their tensors have to be saved in the same order.
namespace fsdp {

namespace {

using Groups = std::vector<std::shared_ptr<Communicator>>;

Groups groups_of(const DTensorSpec& spec) {
  std::vector<int64_t> all_dims(static_cast<size_t>(std::max<int64_t>(spec.ndim(), 1)));
  std::iota(all_dims.begin(), all_dims.end(), 0);
  return spec.groups_cutting(all_dims);
}

/// A tensor on all ranks.
int64_t id_of(const DTensorValue& value, std::string_view place) {
  const auto& spec = *value.spec;
  return static_cast<int64_t>(stable_hash(
      fmt::format("{} {} {} {}", spec.name(), sizes_text(spec.sizes()), c10::toString(value.local.scalar_type()), place)));
}

using GroupSet = std::set<std::shared_ptr<Communicator>>;

/// Returns the groups over which the tensor is cut, and the others of its mesh.
GroupSet groups_around(const DTensorSpec& spec) {
  const auto cutting = groups_of(spec);
  GroupSet around(cutting.begin(), cutting.end());
  for (int m = 0; m < spec.mesh().ndim(); ++m)
    if (spec.mesh().size(m) > 1) around.insert(spec.mesh().get_group(m));
  return around;
}

/// What another rank may be about to write while this one writes a tensor of this spec: whatever is connected with it by
/// groups. They are this rank's own, also where ranks are threads.
std::vector<WholeStorage::Listed> listed_beside(const DTensorSpec& own) {
  auto connected = groups_around(own);
  for (size_t before = 0;;) {
    auto found = WholeStorage::listed([&](const DTensorSpec& spec) {
      const auto around = groups_around(spec);
      if (std::ranges::none_of(around, [&](const auto& group) { return connected.contains(group); })) return false;
      connected.insert(around.begin(), around.end());
      return true;
    });
    if (found.size() == before) return found;
    before = found.size();
  }
}

/// Returns the groups over which the ranks tell each other: tensors that are cut over different dimensions of a mesh come in
/// any order, too.
Groups groups_to_ask(const std::vector<WholeStorage::Listed>& listed, const DTensorSpec& own) {
  Groups all;
  const auto add = [&](const DTensorSpec& spec) {
    for (const auto& group : groups_of(spec))
      if (std::ranges::find(all, group) == all.end()) all.push_back(group);
  };
  for (const auto& one : listed) add(*one.value.spec);
  add(own);
  return all;
}

std::map<int64_t, WholeStorage::Listed> by_id(const std::vector<WholeStorage::Listed>& listed) {
  std::map<int64_t, std::vector<WholeStorage::Listed>> alike;
  for (const auto& one : listed) alike[id_of(one.value, "")].push_back(one);
  std::map<int64_t, WholeStorage::Listed> all;
  for (const auto& [_, tensors] : alike)
    for (size_t i = 0; i < tensors.size(); ++i)
      all.emplace(id_of(tensors[i].value, fmt::format("{} of {}", i, tensors.size())), tensors[i]);
  return all;
}

std::vector<int64_t> all_numbers(int64_t own, const Groups& groups, c10::Device device) {
  const auto part = at::scalar_tensor(own, at::TensorOptions(at::kLong).device(device));
  const auto all = gather_parts(part, groups, "torch::save").cpu().contiguous();
  return {all.const_data_ptr<int64_t>(), all.const_data_ptr<int64_t>() + all.numel()};
}

/// Gathers what all ranks write, and returns this one's. A collective call.
at::Tensor own_whole_of_all(int64_t own, const std::vector<int64_t>& ids, const std::map<int64_t, WholeStorage::Listed>& listed,
                            const DTensorSpec& spec, const Groups& groups) {
  const std::set<int64_t> wanted(ids.begin(), ids.end());
  const bool has_all = std::ranges::all_of(wanted, [&](int64_t id) { return listed.contains(id); });
  const auto answers = all_numbers(has_all, groups, spec.mesh().device());
  require_state(
      std::ranges::all_of(answers, [](int64_t answer) { return answer != 0; }),
      "torch::save: the ranks are about to write different tensors, this one {} of sizes {}, and not every rank has a part of "
      "each. Write the same tensors on all ranks. For an optimizer there is fsdp::optimizer_state_dict, too, and "
      "fsdp::save_checkpoint",
      spec.name().empty() ? "a tensor" : "'" + spec.name() + "'", sizes_text(spec.sizes()));
  at::Tensor whole;
  for (const auto id : wanted) {
    auto gathered = listed.at(id).value.own_whole("torch::save");
    if (id == own) whole = std::move(gathered);
  }
  return whole;
}

/// A collective call, unless it is replicated.
at::Tensor whole_to_save(const WholeStorage& storage) {
  const auto& value = storage.value();
  if (!value.local.defined()) return value.own_whole("torch::save");  // a partial scalar, alike on all ranks
  if (groups_of(*value.spec).empty()) return value.own_whole("torch::save");
  const auto beside = listed_beside(*value.spec);
  const auto groups = groups_to_ask(beside, *value.spec);
  const auto listed = by_id(beside);
  const auto found = std::ranges::find(listed, &storage, [](const auto& one) { return one.second.storage; });
  const auto own = found != listed.end() ? found->first : id_of(value, "");
  const auto ids = all_numbers(own, groups, value.spec->mesh().device());
  const bool are_same = std::ranges::all_of(ids, [&](int64_t id) { return id == own; });
  return are_same ? value.own_whole("torch::save") : own_whole_of_all(own, ids, listed, *value.spec, groups);
}

/// torch::save of a storage that is not on the CPU is `empty({0}).set_(storage, ...).cpu()`. Here the bytes are gathered, so
/// every rank writes what the unsharded program would: a collective call. Every call of the operator passes BackendSelect,
/// where LibTorch has no kernel of it.
at::Tensor& set_storage(c10::DispatchKeySet keys, at::Tensor& self, c10::Storage source, c10::SymInt offset,
                        c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  if (const auto* storage = WholeStorage::of(source.unsafeGetStorageImpl())) {
    // Exactly as many bytes as the storage says.
    source = whole_to_save(*storage).storage();
  }
  constexpr c10::DispatchKeySet below(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::BackendSelect);
  return at::_ops::set__source_Storage_storage_offset::redispatch(keys & below, self, source, offset, size, stride);
}

TORCH_LIBRARY_IMPL(aten, BackendSelect, library) {
  library.impl("set_.source_Storage_storage_offset",
               torch::dispatch(c10::DispatchKey::BackendSelect, TORCH_FN(set_storage)));
}

}  // namespace

}  // namespace fsdp
