#include "mirror.hpp"

#include "dispatch/residency.hpp"
#include "param/grad_dtype.hpp"
#include "shown/dtensors.hpp"
#include "shown/shown_registry.hpp"

namespace fsdp::python {

Mirror::Mirror(py::handle module)
    : Module(py::str(py::type::of(module).attr("__name__")).cast<std::string>()),
      table_(py::object(module.attr("_parameters"))),
      weak_(py::weakref(module)) {}

bool Mirror::is_training() const noexcept {
  if (!is_interpreter_alive()) return Module::is_training();
  const InterpreterLock lock;
  try {
    const auto module = original();
    return module.is_none() ? Module::is_training() : module.attr("training").cast<bool>();
  } catch (const std::exception&) {
    return Module::is_training();
  }
}

std::vector<std::pair<Place, py::object>> Mirror::entries() const {
  std::vector<std::pair<Place, py::object>> found;
  for (const auto& [key, value] : py::reinterpret_borrow<py::dict>(table_.get()))
    found.emplace_back(Place{table_.get(), name_of(key)}, py::reinterpret_borrow<py::object>(value));
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

void Mirror::follow(py::handle module, Mirrors& mirrors) {
  follow_parameters(mirrors);
  take_buffers(module);
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
    mirror->register_module(name_of(key), follow(child));
  }
  return mirror;
}

}  // namespace fsdp::python
