#include "sharded_module/applied_params.hpp"

#include <c10/core/InferenceMode.h>
#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "dispatch/residency.hpp"
#include "fsdp/error.hpp"
#include "fully_shard.hpp"
#include "root/edit/group_conversion.hpp"
#include "root/find_param.hpp"
#include "sharded_module/replacements.hpp"
#include "shown/shown_registry.hpp"

namespace fsdp::python {

namespace {

using Locals = std::vector<at::Tensor>;  // by parameter: what the module shows of it now

bool is_meta(const at::Tensor& local) { return local.is_meta(); }

/// `_apply` on a module below swaps the tensor behind the same object.
bool shows_other_memory(const ShownParam& param) {
  const auto& sharded = param.sharded();
  return !param.is_tied() && !sharded.holds_subclass() && !sharded.local().is_alias_of(sharded.local_tensor());
}

Locals locals_of(const ShownParams& params, const std::vector<Replacement>& replacements) {
  Locals locals;
  for (const auto& param : params.all()) {
    const auto replaced = std::ranges::find(replacements, param, &Replacement::param);
    locals.push_back(replaced == replacements.end() ? param->sharded().local() : replaced->local());
  }
  return locals;
}

/// What a group is to become, in device and dtype, so that it holds these: all of its parameters go the same way.
struct Followed {
  std::optional<c10::Device> device = {};
  std::optional<at::ScalarType> dtype = {};
};

std::vector<size_t> members_of(const ParamGroup& group, const ShownParams& params) {
  std::vector<size_t> members;
  for (size_t i = 0; i < params.all().size(); ++i) {
    const auto* impl = params.all()[i]->sharded().local_tensor().unsafeGetTensorImpl();
    if (std::ranges::any_of(group.params(), [&](const auto& param) { return param.sharded.identity() == impl; }))
      members.push_back(i);
  }
  return members;
}

Followed followed_by(const ParamGroup& group, const ShownParams& params, const Locals& locals, Changed changes) {
  Followed followed;
  const auto members = members_of(group, params);
  if (members.empty()) return followed;
  const auto home = [&](size_t i) -> const at::Tensor& { return params.all()[i]->sharded().local_tensor(); };
  if (locals[members.front()].device() != home(members.front()).device()) followed.device = locals[members.front()].device();
  const auto has_rows = [&](size_t i) { return !params.all()[i]->sharded().holds_subclass(); };
  const auto changed = std::ranges::find_if(
      members, [&](size_t i) { return has_rows(i) && locals[i].scalar_type() != home(i).scalar_type(); });
  if (changed == members.end()) return followed;
  followed.dtype = locals[*changed].scalar_type();
  for (const size_t i : members) {
    if (!has_rows(i)) continue;
    const auto own = home(i).scalar_type(), now = locals[i].scalar_type();
    if (at::isFloatingType(own) && at::isFloatingType(*followed.dtype) ? now == *followed.dtype : now == own) continue;
    if (changes == Changed::kOneByOne && now == own) continue;
    throw StateError(fmt::format("{}: expected a tensor of dtype {}, found {}, while {}, of the same group, holds {}; the "
                                 "floating-point parameters of a group change their dtype together",
                                 full_name_of(*params.all()[*changed]), c10::toString(home(*changed).scalar_type()),
                                 c10::toString(*followed.dtype), full_name_of(*params.all()[i]), c10::toString(now)));
  }
  return followed;
}

void follow(ParamGroup& group, const Followed& followed) {
  py::gil_scoped_release no_gil;
  if (followed.device) fsdp::convert(group, {.device = followed.device});
  if (followed.dtype) fsdp::convert(group, {.dtype = followed.dtype});
}

/// What shows the sharded parameter's memory until now keeps its values, in memory of its own.
void leave_memory(const at::Tensor& local_tensor) {
  const auto found = find_param(local_tensor);
  if (!found) return;
  auto& param = found->param();
  const auto& piece = found->group->parts().shard.piece(found->index);
  const BelowResidency below;
  const c10::Storage before = local_tensor.storage();
  param.make_sharded_param(param.sharded.place().link, found->index, piece);
  ShardStorage::leave_to_aliases(before);
}

bool is_same_view(const at::Tensor& one, const at::Tensor& other) {
  return one.is_alias_of(other) && one.storage_offset() == other.storage_offset() && one.strides() == other.strides();
}

void take_values(const ShownParams& params, const Locals& locals) {
  std::vector<size_t> written;
  for (size_t i = 0; i < locals.size(); ++i) {
    const auto& sharded = params.all()[i]->sharded();
    if (!sharded.holds_subclass() && !sharded.local_tensor().is_meta() && !is_same_view(locals[i], sharded.local_tensor()))
      written.push_back(i);
  }
  // All of them first: one's memory may hold another's values.
  for (const size_t i : written) leave_memory(params.all()[i]->sharded().local_tensor());
  for (const size_t i : written) params.all()[i]->sharded().local_tensor().copy_(locals[i]);
}

/// Returns a parameter on meta where others of its call have been given memory: nothing is taken over then. `to_empty` goes
/// from module to module, and each of several that share a group comes here: the group follows when the last one has memory.
const ShownParam* take_over(const Groups& groups, const ShownParams& params, const std::vector<Replacement>& replacements,
                            Changed changes) {
  const c10::InferenceMode no_inference(false);  // whose tensors could be used in that mode alone
  at::NoGradGuard no_grad;
  const auto locals = locals_of(params, replacements);
  const auto on_meta = std::ranges::find_if(locals, is_meta);
  const bool are_partly_on_meta = on_meta != locals.end() && !std::ranges::all_of(locals, is_meta);
  std::vector<Followed> followed;
  if (!are_partly_on_meta)
    for (const auto& group : groups) followed.push_back(followed_by(*group, params, locals, changes));
  for (const auto& [param, dtensor] : replacements) {
    param->sharded().take_over_grad_dtype();  // of the one that goes
    param->replace_sharded(dtensor.object());
  }
  for (const auto& param : params.all()) param->sharded().take_over_grad_dtype();
  if (are_partly_on_meta) return params.all()[static_cast<size_t>(on_meta - locals.begin())].get();
  for (size_t i = 0; i < groups.size(); ++i) follow(*groups[i], followed[i]);
  take_values(params, locals);
  for (const auto& param : params.all()) param->point_home();
  if (!replacements.empty()) shown_registry().settle_ties();
  return nullptr;
}

}  // namespace

void prepare_apply(const ShownParams& params) {
  for (const auto& param : params.all()) {
    param->sharded().take_over_grad_dtype();
    param->take_over_hooks();
    param->gradient().set_aside();
  }
}

void take_over_applied(const Groups& groups, const ShownParams& params, Changed changes) {
  take_over(groups, params, find_replacements(params, Untied::kLeave), changes);
}

void take_over_replaced(const Groups& groups, const ShownParams& params, Shows form) {
  if (!params.are_replaced() || is_in_functional_call()) return;
  take_over_changed(groups, params);
  params.show_as(form);
}

bool is_in_functional_call() { return python_side().is_in_functional_call().cast<bool>(); }

void take_over_changed(const Groups& groups, const ShownParams& params) {
  const auto replacements = find_replacements(params, Untied::kRefuse);
  if (replacements.empty() &&
      std::ranges::none_of(params.all(), [](const auto& param) { return shows_other_memory(*param); }))
    return;
  if (const auto* left = take_over(groups, params, replacements, Changed::kTogether))
    throw StateError(fmt::format("{}: is on the meta device, but other parameters of its group have been given memory; call "
                                 "to_empty(device=...) on its module, too, before using it",
                                 full_name_of(*left)));
}

}  // namespace fsdp::python
