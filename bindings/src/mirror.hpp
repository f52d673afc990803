#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <unordered_set>
#include <vector>

#include "py_ref.hpp"

namespace fsdp::python {

/// One entry of a Python module's `_parameters`.
struct Place {
  PyObject* table;  ///< the dict, which the module keeps
  std::string name;
  auto operator<=>(const Place&) const = default;
};

/// A Python module as the core sees it: a LibTorch module of the same class name with the same tensors and
/// children, so that the one walk, the names, the ties and the checks of the core hold for Python too.
///
/// Of parameters that are sharded it holds what the core registered; what the Python module shows of them
/// at the moment is ShownParam's business. It knows of the Python module only its table of parameters.
class Mirror final : public torch::nn::Module {
 public:
  explicit Mirror(py::handle module);

  /// All entries, those of None too, as they are in Python now.
  std::vector<std::pair<Place, py::object>> entries() const;

 private:
  friend class Mirrors;
  void follow_parameters();
  void follow_buffers(py::handle module);

  PyRef table_;
};

/// The mirrors of all Python modules that fully_shard has met, each as long as its module lives.
class Mirrors {
 public:
  /// mirrors: a dictionary with weak keys. is_left_out: of a module, whether another composable API owns it.
  Mirrors(py::object mirrors, py::object is_left_out)
      : mirrors_(std::move(mirrors)), is_left_out_(std::move(is_left_out)) {}

  /// The mirror of a tree, brought up to date with it. Modules that another composable API (replicate) owns are
  /// left out, with all below them (S1). visited: gets every module of the tree once, depth-first.
  std::shared_ptr<Mirror> follow(py::handle module, std::vector<std::shared_ptr<Mirror>>& visited);

 private:
  std::shared_ptr<Mirror> mirror_of(py::handle module);

  py::object mirrors_, is_left_out_;
  std::unordered_set<PyObject*> seen_;
};

}  // namespace fsdp::python
