#include "fsdp/schedule_check.hpp"

#include "api/shard/controlled_groups.hpp"
#include "base/require.hpp"
#include "module/handles.hpp"

namespace fsdp {

void set_schedule_check(const FSDPModule& root, const ScheduleCheckOptions& options) {
  auto& context = root_context(handles::state(root), "set_schedule_check");
  for (const auto& time : {options.late_after, options.compare_after})
    require(!time || time->count() > 0,
            "set_schedule_check: expected times above 0 ms, found {} ms; set is_enabled to false to have "
            "no check",
            time.value_or(std::chrono::milliseconds(0)).count());
  std::lock_guard lock(context.mutex());
  context.runner().comm_ctx().trace.set_check(options);
}

}  // namespace fsdp
