#include "base/log.hpp"
#include "group/frozen_mixture.hpp"
#include "group/param_group.hpp"

// What a group says in the log when a step begins: not before, as its parameters get their full names only then.
namespace fsdp {

void ParamGroup::say_notes() {
  has_notes_ = false;
  note_mixture();
}

void ParamGroup::note_mixture() const {
  const auto mixture = mixture_of(*this);
  if (!mixture.is_mixed()) return;
  const auto text = fmt::format("'{}' mixes frozen and trainable parameters: {}", name(), mixture.to_string());
  // What has been frozen since the flat layout was planned travels with the others.
  if (mixture.extra_gradient_bytes > 0)
    warn_once(text + "; freeze them before fully_shard, and nothing is reduced for them");
  else
    info_once(text);
}

}  // namespace fsdp
