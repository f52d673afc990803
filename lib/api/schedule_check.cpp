#include "fsdp/schedule_check.hpp"

#include "base/require.hpp"
#include "fsdp/fully_shard.hpp"
#include "module/module_state.hpp"

namespace fsdp {

void set_schedule_check(const FSDPModule& root, const ScheduleCheckOptions& options) {
  auto& state = root.state();
  require_state(state.is_root(), "set_schedule_check: '{}' is not a root; call it on the root module",
                state.description);
  for (const auto& time : {options.late_after, options.compare_after})
    require(!time || time->count() > 0,
            "set_schedule_check: expected times above 0 ms, found {} ms; set is_enabled to false to have "
            "no check",
            time.value_or(std::chrono::milliseconds(0)).count());
  std::lock_guard lock(state.context->mutex());
  require_state(!state.context->observer().has_communicated(),
                "set_schedule_check: the model has communicated already; call it on all ranks before the "
                "first step");
  state.context->observer().set_check(options);
}

}  // namespace fsdp
