#include "inspect.hpp"

#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "base/environment.hpp"
#include "comm/watch/whereabouts.hpp"
#include "fsdp/log.hpp"
#include "fsdp/report.hpp"
#include "fsdp/statistics.hpp"
#include "fsdp/timeline.hpp"
#include "module/handles.hpp"
#include "python_words.hpp"

namespace fsdp::python {

namespace {

using Self = ShardedModule;
using NoLock = py::call_guard<py::gil_scoped_release>;

py::dict dict_of(const StepStatistics& all) {
  using namespace py::literals;
  return py::dict("all_gathers"_a = all.all_gathers, "gathered_bytes"_a = all.gathered_bytes,
                  "reductions"_a = all.reductions, "reduced_bytes"_a = all.reduced_bytes,
                  "communicated_bytes"_a = all.communicated_bytes);
}

py::dict dict_of(const GroupReport& group) {
  using namespace py::literals;
  return py::dict("name"_a = group.name, "depth"_a = group.depth, "parameters"_a = group.parameters,
                  "sharded_bytes"_a = group.sharded_bytes, "unsharded_bytes"_a = group.unsharded_bytes,
                  "layout"_a = group.layout, "reshard_after_forward"_a = group.reshard_after_forward,
                  "frozen_bytes"_a = group.frozen_bytes, "trainable_bytes"_a = group.trainable_bytes,
                  "exempt_parameters"_a = py::tuple(py::cast(group.exempt_parameters)));
}

py::dict report_of(Self& self) {
  using namespace py::literals;
  Report all;
  double wait_ms = 0;
  {
    py::gil_scoped_release no_gil;
    all = self.controls().report();
    wait_ms = exposed_wait_ms(self.controls());
  }
  py::list groups, outlook;
  for (const auto& group : all.groups) groups.append(dict_of(group));
  for (const auto& row : all.outlook) outlook.append(py::make_tuple(row.budget_bytes, row.gathered_bytes, row.all_gathers));
  auto last_step = dict_of(all.last_step);
  last_step["peak_bytes"] = all.last_step_peak_bytes;
  last_step["exposed_wait_ms"] = wait_ms;
  return py::dict("groups"_a = groups, "forward_order"_a = all.forward_order, "backward_order"_a = all.backward_order,
                  "sharded_bytes"_a = all.bytes.sharded, "unsharded_bytes"_a = all.bytes.unsharded,
                  "peak_unsharded_bytes"_a = all.bytes.peak_unsharded, "last_step"_a = last_step,
                  "budget_bytes"_a = all.budget_bytes, "outlook"_a = outlook, "text"_a = all.to_string());
}

py::dict statistics_of(Self& self) {
  StepStatistics all;
  double wait_ms = 0;
  {
    py::gil_scoped_release no_gil;
    all = statistics(self.controls());
    wait_ms = exposed_wait_ms(self.controls());
  }
  auto dict = dict_of(all);
  dict["exposed_wait_ms"] = wait_ms;
  return dict;
}

/// As the arguments of the package's TimelineEvent.
py::list events_of(const Timeline& timeline) {
  py::list events;
  for (const auto& event : timeline.events)
    events.append(py::make_tuple(to_string(event.kind), event.name, event.begin_ns, event.end_ns, event.subject,
                                 event.group, event.ranks, event.bytes, event.is_given_up));
  return events;
}

py::list bytes_of(const Timeline& timeline) {
  py::list all;
  for (const auto& held : timeline.bytes)
    all.append(py::make_tuple(held.time_ns, held.unsharded, held.packed,
                              timeline.sharded_bytes + held.unsharded + held.packed));
  return all;
}

/// From now on lines go to `function` (level, text), whatever thread they come from, and not to standard error; None: to
/// standard error again.
void set_log_function(const py::object& function, bool wants_info) {
  if (function.is_none()) return set_log_sink({});
  set_log_sink([shared = std::make_shared<const PyRef>(function)](LogLevel level, std::string_view line) {
    if (!is_interpreter_alive()) return;
    const py::gil_scoped_acquire gil;
    try {
      shared->object()(static_cast<int>(level), in_python_words(std::string(line)));
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("fsdp: a log handler");
    }
  });
  if (wants_info) set_log_level(LogLevel::kInfo);
}

/// of_thread (a thread's ident) -> where in the program it is; None: nobody tells.
void tell_whereabouts(const py::object& of_thread) {
  if (of_thread.is_none()) return set_whereabouts({});
  set_whereabouts([shared = std::make_shared<const PyRef>(of_thread)](pthread_t thread) -> std::string {
    if (!is_interpreter_alive()) return "";
    const py::gil_scoped_acquire gil;
    try {
      return shared->object()(static_cast<unsigned long>(thread)).cast<std::string>();
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("fsdp: where a thread is");
      return "";
    }
  });
}

void define_timelines(py::module_& module, PySharded& sharded) {
  py::class_<Timeline> timeline(module, "Timeline");
  not_made_by_python(timeline)
      .def("rank", [](const Timeline& self) { return self.rank; })
      .def("dropped", [](const Timeline& self) { return self.dropped; })
      .def("sharded_bytes", [](const Timeline& self) { return self.sharded_bytes; })
      .def("events", &events_of)
      .def("bytes", &bytes_of);
  module.def("timeline_json", &timeline_json);
  sharded
      .def("start_timeline",
           [](Self& self, size_t max_events) { start_timeline(self.controls(), max_events); }, NoLock())
      .def("stop_timeline", [](Self& self) { return stop_timeline(self.controls()); }, NoLock());
}

}  // namespace

void define_inspection(py::module_& module, PySharded& sharded) {
  // The same for all modules of a root.
  sharded.def("root_id", [](Self& self) { return reinterpret_cast<uintptr_t>(handles::state(self.controls()).root().get()); })
      .def("report", &report_of)
      .def("statistics", &statistics_of);
  define_timelines(module, sharded);
  module.def("set_log_function", &set_log_function);
  module.def("set_whereabouts", &tell_whereabouts);
  module.def("asked_log_level", [] { return environment::is_log_level_set() ? environment::log_level() : std::string(); });
}

}  // namespace fsdp::python
