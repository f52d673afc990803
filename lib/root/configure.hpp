#pragma once

#include <mutex>
#include <utility>

#include "group/param_group.hpp"
#include "root/group_port.hpp"
#include "root/root_context.hpp"

// The one way to what users set: under the root's lock, with all that follows. If it throws, nothing has changed.
namespace fsdp {

/// change(GroupOptions&) -> void.
template <class Change>
void configure(ParamGroup& group, Change&& change) {
  auto& root = root_of(group);
  const std::lock_guard lock(root.mutex());
  auto options = group.options();
  change(options);
  group.set_options(std::move(options));
  root.runner().facts_changed(group);
}

/// change(RootContext::Options&) -> void.
template <class Change>
void configure(RootContext& root, Change&& change) {
  const std::lock_guard lock(root.mutex());
  auto options = root.options();
  change(options);
  root.options() = options;
  root.runner().scheduler().options() = options.schedule;
}

}  // namespace fsdp
