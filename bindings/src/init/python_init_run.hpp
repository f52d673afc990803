#pragma once

#include <memory>
#include <optional>
#include <string>
#include <unordered_map>

#include "api/init/init_run.hpp"
#include "mirror.hpp"

namespace fsdp::python {

/// The core's run of initialisers over a tree of Python modules. Parameters and buffers are named by the Python module that has
/// them and their entry there; a name that stands for None, or for what has its values already, is passed over.
class PythonInitRun {
 public:
  /// initialize: (module, run) is called for every module, innermost first, twice: to rehearse and to write.
  /// is_left_out: see Mirrors.
  PythonInitRun(const py::object& module, const py::object& is_left_out, uint64_t seed, py::object initialize);

  /// Throws UsageError, with nothing changed, for what no initialiser covers.
  void rehearse();
  /// What is neither sharded nor has memory gets some; of the mesh's device, or the CPU.
  void allocate_plain();
  void run();

  // --- inside `initialize`
  at::Tensor tensor_at(const py::handle& module, const std::string& name) const;
  Initializer& now();

 private:
  bool apply(torch::nn::Module& module, Initializer& initializer);

  std::shared_ptr<Mirror> root_;
  std::unordered_map<const torch::nn::Module*, PyRef> modules_;
  PyRef initialize_;
  InitOptions options_;
  std::optional<InitRun> run_;
  Initializer* now_ = nullptr;
};

void define_init(py::module_& module);

}  // namespace fsdp::python
