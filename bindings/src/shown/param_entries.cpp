#include "shown/param_entries.hpp"

namespace fsdp::python {

void ParamEntries::add(const PyEntry& place, const PyRef& parameter) {
  // Interned, as the table's own keys: a lookup then compares addresses.
  PyObject* key = py::str(place.name).release().ptr();
  PyUnicode_InternInPlace(&key);
  entries_.push_back({place, PyRef(py::reinterpret_borrow<py::object>(place.table)),
                      PyRef(py::reinterpret_steal<py::object>(key))});
  put_at(entries_.back(), parameter);
}

void ParamEntries::put(const PyRef& parameter) const {
  for (const auto& entry : entries_) put_at(entry, parameter);
}

std::vector<PyObject*> ParamEntries::all_now() const {
  std::vector<PyObject*> all;
  for (const auto& entry : entries_) all.push_back(now_at(entry));
  return all;
}

}  // namespace fsdp::python
