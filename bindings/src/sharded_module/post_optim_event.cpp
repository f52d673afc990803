#include "sharded_module/post_optim_event.hpp"

#include <algorithm>
#include <mutex>
#include <optional>

namespace fsdp::python {

PostOptimEvent::PostOptimEvent(py::object event) {
  if (event.is_none()) return;
  if (!py::hasattr(event, "wait"))
    throw py::type_error("set_post_optim_event: expected an event that has been recorded, found " +
                         py::repr(event).cast<std::string>());
  event_ = PyRef(std::move(event));
}

void PostOptimEvent::wait(RootContext& context, c10::Device device) {
  const auto event = PyRef(std::move(event_)).object();
  std::optional<c10::Stream> stream;
  bool is_all_gathered = false;
  {
    py::gil_scoped_release no_gil;
    const std::lock_guard lock(context.mutex());
    stream = context.runner().comm_ctx().all_gather_stream.to_wait_for_event(device);
    // Some groups are never gathered (one rank's), so no gather of theirs could wait for it.
    is_all_gathered =
        std::ranges::none_of(context.runner().groups(), [](const auto* group) { return group->parts().is_never_released(); });
  }
  if (!stream || !is_all_gathered) event.attr("wait")();
  if (!stream) return;
  const auto devices = py::module_::import("torch").attr("get_device_module")(c10::DeviceTypeName(device.type(), true));
  event.attr("wait")(devices.attr("Stream")(py::arg("stream_id") = stream->id(),
                                            py::arg("device_index") = static_cast<int>(stream->device_index()),
                                            py::arg("device_type") = static_cast<int>(stream->device_type())));
}

}  // namespace fsdp::python
