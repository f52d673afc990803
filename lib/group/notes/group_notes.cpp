#include "group/notes/group_notes.hpp"

#include "base/log.hpp"
#include "comm/work.hpp"
#include "dispatch/residency.hpp"
#include "group/notes/frozen_mixture.hpp"
#include "group/param_group.hpp"

namespace fsdp {

namespace {

void note_mixture(const ParamGroup& group) {
  const auto mixture = mixture_of(group);
  if (!mixture.is_mixed()) return;
  const auto text = fmt::format("'{}' mixes frozen and trainable parameters: {}", group.name(), mixture.to_string());
  // What has been frozen since the flat layout was planned travels with the others.
  if (mixture.extra_gradient_bytes > 0)
    warn_once(text + "; freeze them before fully_shard, and nothing is reduced for them");
  else
    info_once(text);
}

}  // namespace

void GroupNotes::note_first_values(const GroupParts& parts) {
  if (parts.identity.mesh_info.data_parallel_size() == 1 || parts.config.device.is_meta()) return;
  BelowResidency below;
  auto values = std::make_unique<FirstValues>();
  for (const auto& param : parts.params)
    values->add(param.sharded.is_taken() ? at::Tensor() : param.unsharded_param(), param.sharded.version());
  first_values_ = std::move(values);
}

void GroupNotes::say_all(const ParamGroup& group) {
  is_due_ = false;
  left_.close([&](size_t i) { return group.params()[i].name(); });
  for (const auto& left : left_.take_used()) {
    std::vector<std::string> names;
    for (const size_t i : left.params) names.push_back(group.params()[i].name());
    if (!left.is_larger) {
      warn_once(
          fmt::format("{}: another tensor still shows the {} bytes that this parameter had before fully_shard (a view, an "
                      "alias, or a graph "
                      "of autograd). They are not freed, and to read them is an error from now on: make the tensor anew from "
                      "the parameter, "
                      "or give it memory of its own (clone) before fully_shard",
                      listed(names), with_separators(left.bytes)));
      continue;
    }
    warn_once(fmt::format(
        "{}: before fully_shard this was a view of {} bytes that another tensor still uses. These bytes are not freed, and a "
        "write to one of the tensors no longer shows in the other; drop the other tensor, or give the module memory of its own "
        "(clone) before fully_shard",
        listed(names), with_separators(left.bytes)));
  }
  note_mixture(group);
}

}  // namespace fsdp
