#include "init/python_init_run.hpp"

#include <c10/util/ScopeExit.h>

#include "fsdp/error.hpp"
#include "fully_shard.hpp"
#include "module/module_access.hpp"
#include "whole/known_mirrors.hpp"

namespace fsdp::python {

namespace {

using Run = PythonInitRun;

void uniform(Run& run, const py::handle& module, const std::string& name, double low, double high) {
  run.now().uniform_(run.tensor_at(module, name), low, high);
}

void normal(Run& run, const py::handle& module, const std::string& name, double mean, double std) {
  run.now().normal_(run.tensor_at(module, name), mean, std);
}

void trunc_normal(Run& run, const py::handle& module, const std::string& name, double mean, double std, double low,
                  double high) {
  run.now().trunc_normal_(run.tensor_at(module, name), mean, std, low, high);
}

void fill_range(Run& run, const py::handle& module, const std::string& name, int64_t begin, int64_t end, double value) {
  run.now().fill_range_(run.tensor_at(module, name), {begin, end}, value);
}

void whole(Run& run, const py::handle& module, const std::string& name, const py::object& function) {
  run.now().whole_(run.tensor_at(module, name), [&function](at::Tensor& values, at::Generator generator) {
    function(py::cast(values), py::cast(generator));
  });
}

void define_draws(py::class_<Run>& run) {
  const auto at = [](Run& self, const py::handle& module, const std::string& name) { return self.tensor_at(module, name); };
  run.def("uniform_", &uniform)
      .def("normal_", &normal)
      .def("trunc_normal_", &trunc_normal)
      .def("fill_range_", &fill_range)
      .def("whole_", &whole)
      .def("constant_", [at](Run& self, const py::handle& module, const std::string& name,
                             double value) { self.now().constant_(at(self, module, name), value); })
      .def("copy_", [at](Run& self, const py::handle& module, const std::string& name,
                         const at::Tensor& values) { self.now().copy_(at(self, module, name), values); })
      .def("eye_", [at](Run& self, const py::handle& module,
                        const std::string& name) { self.now().eye_(at(self, module, name)); })
      .def("dirac_", [at](Run& self, const py::handle& module,
                          const std::string& name) { self.now().dirac_(at(self, module, name)); })
      .def("orthogonal_", [at](Run& self, const py::handle& module, const std::string& name,
                               double gain) { self.now().orthogonal_(at(self, module, name), gain); })
      .def("sparse_", [at](Run& self, const py::handle& module, const std::string& name, double sparsity,
                           double std) { self.now().sparse_(at(self, module, name), sparsity, std); });
}

}  // namespace

PythonInitRun::PythonInitRun(const py::object& module, const py::object& is_left_out, uint64_t seed, py::object initialize)
    : initialize_(std::move(initialize)) {
  const auto& side = python_side();
  root_ = Mirrors(side.mirrors, is_left_out, side.local_tensors, side.stand_in).follow(module);
  for (const auto& below : module.attr("modules")())
    if (const auto mirror = known_mirror(below)) modules_[mirror.get()] = PyRef(py::reinterpret_borrow<py::object>(below));
  options_.seed = seed;
  options_.initializers.push_back(
      {[this](torch::nn::Module& below, Initializer& initializer) { return apply(below, initializer); }});
  run_.emplace(walk_tree(*root_, "materialize"), options_, InitRun::Targets::kMeta, "materialize");
}

bool PythonInitRun::apply(torch::nn::Module& module, Initializer& initializer) {
  now_ = &initializer;
  const auto leave = c10::make_scope_exit([this] { now_ = nullptr; });
  if (const auto found = modules_.find(&module); found != modules_.end())
    initialize_.object()(found->second.object(), py::cast(this, py::return_value_policy::reference));
  return true;
}

Initializer& PythonInitRun::now() {
  if (now_ == nullptr) throw StateError("materialize: an initialiser was used outside the function that it was made for");
  return *now_;
}

at::Tensor PythonInitRun::tensor_at(const py::handle& module, const std::string& name) const {
  const auto mirror = known_mirror(module);
  if (!mirror) return {};
  auto& table = ModuleAccess::parameters(*mirror);
  for (size_t slot = 0; slot < table.size(); ++slot)
    if (table[slot].key() == name) return python::tensor_at(*mirror, slot);
  const auto buffers = mirror->named_buffers(/*recurse=*/false);
  const auto* buffer = buffers.find(name);
  return buffer != nullptr ? *buffer : at::Tensor();
}

void PythonInitRun::rehearse() { run_->rehearse(); }

void PythonInitRun::allocate_plain() { fsdp::to_empty(*root_); }

void PythonInitRun::run() { run_->run(); }

void define_init(py::module_& module) {
  py::class_<Run> run(module, "InitRun");
  not_made_by_python(run)
      .def("rehearse", &Run::rehearse)
      .def("allocate_plain", &Run::allocate_plain)
      .def("run", &Run::run);
  define_draws(run);
  module.def("init_run", [](const py::object& root, const py::object& is_left_out, uint64_t seed, py::object initialize) {
    return std::make_unique<Run>(root, is_left_out, seed, std::move(initialize));
  });
}

}  // namespace fsdp::python
