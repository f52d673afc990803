#include "sharded_module/replacements.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "dispatch/residency.hpp"
#include "fsdp/error.hpp"
#include "root/find_param.hpp"
#include "shown/shown_registry.hpp"

namespace fsdp::python {

namespace {

std::string described(py::handle tensor) {
  const auto sizes = py::str(py::tuple(tensor.attr("shape"))).cast<std::string>();
  if (!is_dtensor(tensor)) return fmt::format("an ordinary tensor of sizes {}", sizes);
  return fmt::format("a DTensor of sizes {}, {} over {}", sizes, py::str(tensor.attr("placements")).cast<std::string>(),
                     py::str(tensor.attr("device_mesh")).cast<std::string>());
}

/// The DTensor that is meant: of a sharded parameter in another form, its own.
py::object dtensor_meant(const ShownParam& param, PyObject* now) {
  if (param.forms().is_one(now)) return param.sharded().object();
  const auto& tensor = THPVariable_Unpack(now);
  if (const auto found = is_dtensor(now) ? std::nullopt : find_param(tensor))
    if (const auto shown = shown_registry().find(found->param().local_tensor())) return shown->sharded().object();
  return py::reinterpret_borrow<py::object>(now);
}

void check_form(const ShownParam& param, const py::object& dtensor) {
  const auto own = param.sharded().object();
  if (!is_dtensor(dtensor))
    throw py::type_error(fmt::format(
        "parameter '{}' of a sharded module has been replaced by a tensor that is no DTensor; expected {}, found {}. To write "
        "values, copy_ them to the parameter under torch.no_grad(), or load them with load_state_dict(..., assign=False), or "
        "put DTensors like those of its own state_dict() in its place; sizes are changed before fully_shard",
        full_name_of(param), described(own), described(dtensor)));
  const bool is_alike = dtensor.attr("shape").equal(own.attr("shape")) &&
                        dtensor.attr("placements").equal(own.attr("placements")) &&
                        dtensor.attr("device_mesh").equal(own.attr("device_mesh")) &&
                        is_gathered_by_hooks(dtensor.attr("_local_tensor")) == param.sharded().holds_subclass();
  if (!is_alike)
    throw UsageError(fmt::format("parameter '{}' of a sharded module has been replaced by another DTensor than fully_shard "
                                 "made; expected {}, found {}. Redistribute it first; sizes are changed before fully_shard",
                                 full_name_of(param), described(own), described(dtensor)));
}

bool have_same_memory(const ShownParam& param, py::handle one, py::handle other) {
  if (param.sharded().holds_subclass()) return true;
  const auto a = local_tensor_of(one), b = local_tensor_of(other);
  return a.is_meta() || b.is_meta() || (a.is_alias_of(b) && a.storage_offset() == b.storage_offset());
}

/// What its places hold, each once, in their order.
std::vector<py::object> dtensors_at(const ShownParam& param) {
  std::vector<py::object> found;
  for (PyObject* now : param.forms().entries().all_now()) {
    if (!param.forms().is_one(now) && !is_parameter(now)) continue;
    auto dtensor = dtensor_meant(param, now);
    if (std::ranges::none_of(found, [&](const auto& known) { return known.is(dtensor); })) found.push_back(std::move(dtensor));
  }
  return found;
}

/// Null: nothing else stands there, or what is left to be settled.
py::object replacement_of(const ShownParam& param, Untied untied) {
  if (!param.forms().is_replaced()) return {};
  const auto found = dtensors_at(param);
  const auto own = param.sharded().object();
  for (const auto& dtensor : found)
    if (!dtensor.is(own)) check_form(param, dtensor);
  for (const auto& dtensor : found) {
    if (have_same_memory(param, found.front(), dtensor)) continue;
    if (untied == Untied::kLeave) return {};
    throw StateError(fmt::format("parameter '{}' stands in several modules of a sharded model (tied weights), which now hold "
                                 "different parameters; put one and the same in all of them. They are untied before "
                                 "fully_shard",
                                 full_name_of(param)));
  }
  return found.front();
}

}  // namespace

std::string full_name_of(const ShownParam& param) {
  const auto found = find_param(param.sharded().local_tensor());
  return found ? found->param().name() : param.forms().entries().name();
}

std::vector<Replacement> find_replacements(const ShownParams& params, Untied untied) {
  std::vector<Replacement> found;
  for (const auto& param : params.all())
    if (auto dtensor = replacement_of(*param, untied)) found.push_back({param, PyRef(std::move(dtensor))});
  return found;
}

}  // namespace fsdp::python
