#include "mirror.hpp"

#include <algorithm>

#include "dispatch/residency.hpp"
#include "param/grad_dtype.hpp"
#include "shown/dtensors.hpp"
#include "shown/shown_registry.hpp"

namespace fsdp::python {

Mirror::Mirror(py::handle module)
    : Module(py::str(py::type::of(module).attr("__name__")).cast<std::string>()),
      table_(py::object(module.attr("_parameters"))),
      module_(py::weakref(module)) {}

bool Mirror::is_training() const noexcept {
  if (!is_interpreter_alive()) return Module::is_training();
  const InterpreterLock lock;
  try {
    const auto module = this->module();
    return module.is_none() ? Module::is_training() : module.attr("training").cast<bool>();
  } catch (const std::exception&) {
    return Module::is_training();
  }
}

std::vector<std::pair<PyEntry, py::object>> Mirror::entries() const {
  std::vector<std::pair<PyEntry, py::object>> found;
  for (const auto& [key, value] : py::reinterpret_borrow<py::dict>(table_.get()))
    found.emplace_back(PyEntry{table_.get(), name_of(key)}, py::reinterpret_borrow<py::object>(value));
  return found;
}

void Mirror::follow_parameters(Mirrors& mirrors) {
  // An entry never goes: the core knows entries by their position.
  std::unordered_set<std::string> names;
  for (const auto& [place, value] : entries()) {
    names.insert(place.name);
    auto tensor = tensor_of(value);
    if (tensor.defined() && shown_registry().shows_at(tensor, place)) continue;
    tensor = mirrors.seen(value);
    auto* known = parameters_.find(place.name);
    if (known == nullptr)
      parameters_.insert(place.name, tensor);
    else
      *known = tensor;
    if (tensor.defined())
      mirrors.add_plain({place, value, tensor.unsafeGetTensorImpl()});
  }
  for (auto& entry : parameters_)
    if (!names.contains(entry.key())) entry.value() = at::Tensor();
}

/// Buffers of a LibTorch module can only be added, while `module.to()` replaces them in Python: a module that has those of now
/// takes the place of what this one was.
void Mirror::take_buffers(py::handle module) {
  Module fresh(name());
  for (const auto& [key, value] : module.attr("_buffers").cast<py::dict>())
    fresh.register_buffer(name_of(key), tensor_of(value));
  auto parameters = std::move(parameters_);
  Module::operator=(std::move(fresh));
  parameters_ = std::move(parameters);
}

/// For a look before each step.
void Mirror::take_names(py::handle module) {
  below_.clear();
  children_seen_.clear();
  for (const auto& [key, child] : module.attr("_modules").cast<py::dict>())
    children_seen_.emplace_back(child.is_none() ? py::object(py::none()) : py::object(py::weakref(child)));
  keys_seen_.clear();
  for (const auto& [key, value] : py::reinterpret_borrow<py::dict>(table_.get()))
    keys_seen_.emplace_back(py::reinterpret_borrow<py::object>(key));
}

bool Mirror::has_changed_itself() const {
  const auto module = this->module();
  if (module.is_none()) return false;
  static PyObject* const name = PyUnicode_InternFromString("_modules");
  const auto attributes = py::reinterpret_steal<py::object>(PyObject_GenericGetDict(module.ptr(), nullptr));
  PyObject* modules = attributes ? PyDict_GetItem(attributes.ptr(), name) : nullptr;
  if (modules == nullptr || !PyDict_Check(modules)) return false;
  PyObject *key = nullptr, *value = nullptr;
  Py_ssize_t at = 0;
  size_t count = 0;
  for (; PyDict_Next(modules, &at, &key, &value) != 0; ++count) {
    if (count == children_seen_.size()) return true;
    PyObject* seen = children_seen_[count].get();
    if (value != (seen == Py_None ? seen : PyWeakref_GetObject(seen))) return true;
  }
  if (count != children_seen_.size()) return true;
  at = 0;
  for (count = 0; PyDict_Next(table_.get(), &at, &key, &value) != 0; ++count)
    if (count == keys_seen_.size() || key != keys_seen_[count].get()) return true;
  return false;
}

bool Mirror::has_changed() const {
  static uint64_t looks = 0;  // guarded by the interpreter's lock
  return has_changed(++looks);
}

bool Mirror::has_changed(uint64_t look) const {
  if (std::exchange(look_, look) == look) return false;  // a tree may lead back up
  if (has_changed_itself()) return true;
  return std::ranges::any_of(below_, [look](const auto& child) { return child.second->has_changed(look); });
}

void Mirror::adopt(std::string name, std::shared_ptr<Mirror> child) {
  below_.emplace_back(name, child.get());
  register_module(std::move(name), std::move(child));
}

const Mirror* Mirror::child(const std::string& name) const {
  const auto found = std::ranges::find(below_, name, &std::pair<std::string, const Mirror*>::first);
  return found == below_.end() ? nullptr : found->second;
}

void Mirror::follow(py::handle module, Mirrors& mirrors) {
  follow_parameters(mirrors);
  take_buffers(module);
  take_names(module);
  // Without children: it goes down the tree, which in Python may lead back up.
  train(module.attr("training").cast<bool>());
}

std::shared_ptr<Mirror> Mirrors::mirror_of(py::handle module) {
  py::object known = mirrors_.attr("get")(module);
  if (!known.is_none()) return known.cast<std::shared_ptr<Mirror>>();
  auto mirror = std::make_shared<Mirror>(module);
  mirrors_.attr("__setitem__")(module, mirror);
  return mirror;
}

at::Tensor Mirrors::seen(py::handle parameter) {
  auto tensor = tensor_of(parameter);
  if (!tensor.defined()) return tensor;
  if (is_dtensor(parameter)) return seen_of_dtensor(parameter, tensor);
  if (is_gathered_by_hooks(parameter)) return tensor_of(stand_in_(parameter));
  return tensor;
}

at::Tensor Mirrors::seen_of_dtensor(py::handle parameter, const at::Tensor& tensor) {
  const auto local = local_tensor_of(parameter);
  const auto known = local_tensors_.attr("get")(parameter);
  auto seen = known.is_none() ? at::Tensor() : tensor_of(known);
  // An unsharded parameter by now: its memory is the library's.
  if (seen.defined() && has_residency_key(seen.unsafeGetTensorImpl())) return seen;
  if (!seen.defined() || !seen.is_alias_of(local) || seen.sizes() != local.sizes()) {
    seen = local.variable_data();
    local_tensors_.attr("__setitem__")(parameter, seen);
  }
  seen.set_requires_grad(tensor.requires_grad());
  set_grad_dtype(seen, grad_dtype_of(tensor));
  return seen;
}

std::shared_ptr<Mirror> Mirrors::follow(py::handle module) {
  const RecursionLevel level(" while following a tree of modules");
  auto mirror = mirror_of(module);
  if (!seen_.insert(module.ptr()).second) return mirror;
  followed_.push_back(mirror);
  mirror->follow(module, *this);
  for (const auto& [key, child] : module.attr("_modules").cast<py::dict>()) {
    if (child.is_none() || is_left_out_(child).cast<bool>()) continue;
    mirror->adopt(name_of(key), follow(child));
  }
  return mirror;
}

}  // namespace fsdp::python
