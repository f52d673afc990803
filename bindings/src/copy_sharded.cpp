#include "copy_sharded.hpp"

#include <fmt/format.h>

#include <unordered_map>

#include "api/params/find_param.hpp"
#include "api/shard/shard_like.hpp"
#include "fsdp/error.hpp"
#include "fully_shard.hpp"
#include "module/handles.hpp"
#include "module/state/module_table.hpp"

namespace fsdp::python {

namespace {

using MirrorList = std::vector<std::shared_ptr<Mirror>>;

/// A parameter of the copy.
struct Copied {
  py::object sharded, unsharded;
  std::shared_ptr<ShownParam> original;
};
using CopiedParams = std::unordered_map<const c10::TensorImpl*, Copied>;  // by the DTensor

py::object copied(const py::dict& memo, const py::object& original) {
  return memo[py::int_(reinterpret_cast<uintptr_t>(original.ptr()))];
}

CopiedParams copied_params(const std::vector<std::shared_ptr<ShardedModule>>& sharded, const py::dict& memo) {
  CopiedParams params;
  for (const auto& module : sharded)
    for (const auto& param : present(module, "a sharded module")->params().all()) {
      Copied copy{copied(memo, param->sharded().object()), copied(memo, param->forms().unsharded().object()), param};
      params.emplace(tensor_of(copy.sharded).unsafeGetTensorImpl(), std::move(copy));
    }
  return params;
}

/// Calls `visit(mirror, place, copied)` for every entry of the copy that shows a sharded parameter.
template <class Visit>
void for_entries(const MirrorList& mirrors, const CopiedParams& params, const Visit& visit) {
  for (const auto& mirror : mirrors)
    for (const auto& [place, value] : mirror->entries()) {
      const auto tensor = tensor_of(value);
      const auto found = tensor.defined() ? params.find(tensor.unsafeGetTensorImpl()) : params.end();
      if (found != params.end()) visit(*mirror, place, found->second);
    }
}

/// By unsharded parameter, until their modules keep them.
using Made = std::unordered_map<const c10::TensorImpl*, std::shared_ptr<ShownParam>>;

Made show_copies(const MirrorList& mirrors, const CopiedParams& params) {
  Made made;
  for_entries(mirrors, params, [&](Mirror&, const PyEntry& place, const Copied& copy) {
    const auto handle = tensor_of(copy.unsharded);
    auto& shown = made[handle.unsafeGetTensorImpl()];
    if (!shown) {
      const auto param = find_param(handle);
      if (!param) return;
      shown = ShownParam::make(param->param().local_tensor(), copy.sharded, copy.unsharded,
                               copy.original->forms().handle_over(handle), python_side().dtensors);
      shown->point_home();
    }
    shown->add_place(place);
  });
  return made;
}

using CopyOf = std::unordered_map<const Mirror*, std::shared_ptr<Mirror>>;

MirrorList units_of_copy(const ShardedModule& original, const CopyOf& copy_of) {
  MirrorList units;
  for (const auto& unit : original.modules()) {
    const auto found = copy_of.find(unit.get());
    if (found == copy_of.end())
      throw UsageError(fmt::format("deepcopy: {} was sharded in one call with {}, which is no longer in the module "
                                   "that is copied", original.modules().front()->name(), unit->name()));
    units.push_back(found->second);
  }
  return units;
}

}  // namespace

std::vector<std::shared_ptr<ShardedModule>> copy_sharded(const py::object& module, const py::object& copy,
                                                         const std::vector<std::shared_ptr<ShardedModule>>& sharded,
                                                         const py::dict& memo, const py::object& is_left_out) {
  const auto& side = python_side();
  Mirrors of_original(side.mirrors, is_left_out, side.local_tensors, side.stand_in);
  Mirrors of_copy(side.mirrors, is_left_out, side.local_tensors, side.stand_in);
  const auto original = of_original.follow(module), mirror = of_copy.follow(copy);
  const MirrorList &originals = of_original.followed(), &copies = of_copy.followed();
  if (originals.size() != copies.size())
    throw UsageError(fmt::format("deepcopy: {} has {} modules, its copy {}", original->name(), originals.size(),
                                 copies.size()));
  const auto params = copied_params(sharded, memo);
  for_entries(copies, params, [](Mirror& each, const PyEntry& place, const Copied& param) {
    each.put(place.name, tensor_of(param.unsharded));
  });
  CopyOf copy_of;
  for (size_t i = 0; i < originals.size(); ++i) copy_of.emplace(originals[i].get(), copies[i]);
  for (const auto& each : sharded) units_of_copy(*each, copy_of);
  {
    py::gil_scoped_release no_gil;
    shard_like(*original, mirror);
  }
  const auto made = show_copies(copies, params);
  std::vector<std::shared_ptr<ShardedModule>> result;
  for (const auto& each : sharded) {
    auto units = units_of_copy(*each, copy_of);
    auto state = find_state(*units.front());
    result.push_back(std::make_shared<ShardedModule>(handles::module(std::move(state)), std::move(units), each->casts()));
  }
  for (const auto& each : result) each->attach();
  for (const auto& each : result) each->find_params();
  return result;
}

}  // namespace fsdp::python
