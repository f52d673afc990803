#pragma once

#include <vector>

#include "py_entry.hpp"

namespace fsdp::python {

/// The entries of Python modules' tables that hold one parameter.
class ParamEntries {
 public:
  struct Entry {
    PyEntry place;
    PyRef table, key;  ///< held: the module may go before
  };

  /// `parameter` stands at `place` from now on.
  void add(const PyEntry& place, const PyRef& parameter);
  /// Puts it everywhere.
  void put(const PyRef& parameter) const;
  /// Puts it where one stands that `is_ours`: what the caller has put there stays (functional_call).
  template <class IsOurs>
  void put_over(const PyRef& parameter, const IsOurs& is_ours) const {
    for (const auto& entry : entries_)
      if (is_ours(now_at(entry))) put_at(entry, parameter);
  }

  /// What stands at the first now; null: nothing.
  PyObject* now() const { return now_at(entries_.front()); }
  /// What stands there now, of all of them; null: nothing.
  std::vector<PyObject*> all_now() const;
  /// True if what stands at one of them is such.
  template <class IsSuch>
  bool any_now(const IsSuch& is_such) const {
    for (const auto& entry : entries_)
      if (is_such(now_at(entry))) return true;
    return false;
  }
  /// Returns the name that the first entry has in its module.
  const std::string& name() const { return entries_.front().place.name; }
  const std::vector<Entry>& all() const { return entries_; }

 private:
  static PyObject* now_at(const Entry& entry) {
    PyObject* now = PyDict_GetItemWithError(entry.table.get(), entry.key.get());
    if (now == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
    return now;
  }
  static void put_at(const Entry& entry, const PyRef& parameter) {
    check_status(PyDict_SetItem(entry.table.get(), entry.key.get(), parameter.get()));
  }

  std::vector<Entry> entries_;
};

}  // namespace fsdp::python
