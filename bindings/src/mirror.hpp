#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <unordered_set>
#include <vector>

#include "module/shows_own_parameters.hpp"
#include "py_entry.hpp"

namespace fsdp::python {

class Mirrors;

/// A Python module as the core sees it: a LibTorch module of the same class name with the same tensors and
/// children, so that the one walk, the names, the ties and the checks of the core hold for Python too.
///
/// Of parameters that are sharded it holds what the core registered; what the Python module shows of them
/// at the moment is ShownParam's business. It keeps of the Python module only its table of parameters.
class Mirror final : public torch::nn::Module, public ShowsOwnParameters {
 public:
  explicit Mirror(py::handle module);

  /// All entries, those of None too, as they are in Python now.
  std::vector<std::pair<PyEntry, py::object>> entries() const;
  /// Holds `tensor` at an entry, whatever the Python module shows there.
  void put(const std::string& name, at::Tensor tensor) { parameters_[name] = std::move(tensor); }
  /// Holds the module's own tensors as they are in Python now, and no children. What it has not seen sharded goes to `mirrors`.
  void follow(py::handle module, Mirrors& mirrors);
  /// The Python module; None once that has gone. Needs the interpreter's lock.
  py::object module() const { return py::reinterpret_borrow<py::object>(PyWeakref_GetObject(module_.get())); }
  void adopt(std::string name, std::shared_ptr<Mirror> child);
  /// Here, or in a module below, Python holds other modules than when this was last followed, or parameters of other names.
  bool has_changed() const;
  /// The mirror that it had at this name when it was last followed; null: none.
  const Mirror* child(const std::string& name) const;
  /// It had a parameter of this name, which may have been deleted since.
  bool had_parameter(const std::string& name) const { return parameters_.contains(name); }
  /// The Python module's mode now.
  bool is_training() const noexcept override;

 private:
  void follow_parameters(Mirrors& mirrors);
  void take_buffers(py::handle module);
  void take_names(py::handle module);
  bool has_changed_itself() const;
  bool has_changed(uint64_t look) const;

  PyRef table_, module_;                    ///< a weak reference
  std::vector<std::pair<std::string, const Mirror*>> below_;  ///< the children, which LibTorch keeps
  std::vector<PyRef> children_seen_, keys_seen_;              ///< weak references, or None; interned names
  mutable uint64_t look_ = 0;                                 ///< the last that came here
};

/// An entry that holds a parameter which nobody has sharded yet.
struct PlainEntry {
  PyEntry place;
  py::object parameter;
  const c10::TensorImpl* seen_as;  ///< by the core
};

/// The mirrors of all Python modules that fully_shard has met, each as long as its module lives.
class Mirrors {
 public:
  /// mirrors: a dictionary with weak keys. is_left_out: of a module, whether another composable API owns it.
  /// local_tensors: a dictionary with weak keys, DTensor -> what the core sees of it.
  /// stand_in: (parameter with fsdp_pre_all_gather) -> the plain tensor that the core has for it.
  Mirrors(py::object mirrors, py::object is_left_out, py::object local_tensors, py::object stand_in)
      : mirrors_(std::move(mirrors)),
        is_left_out_(std::move(is_left_out)),
        local_tensors_(std::move(local_tensors)),
        stand_in_(std::move(stand_in)) {}

  /// The mirror of a tree, brought up to date with it. Modules that another composable API (replicate) owns are
  /// left out, with all below them.
  std::shared_ptr<Mirror> follow(py::handle module);
  /// The tensor that the core sees of a parameter: itself; of a DTensor, one over its local tensor's memory; of a tensor
  /// with fsdp_pre_all_gather, one that stands for it. The same one every time. Undefined for None.
  at::Tensor seen(py::handle parameter);

  /// Every module of the trees that were followed once, depth-first.
  const std::vector<std::shared_ptr<Mirror>>& followed() const { return followed_; }
  /// Returns the entries of these modules that hold a parameter which nobody has sharded yet.
  const std::vector<PlainEntry>& plain_entries() const { return plain_; }
  void add_plain(PlainEntry entry) { plain_.push_back(std::move(entry)); }

 private:
  std::shared_ptr<Mirror> mirror_of(py::handle module);

  at::Tensor seen_of_dtensor(py::handle parameter, const at::Tensor& tensor);

  py::object mirrors_, is_left_out_, local_tensors_, stand_in_;
  std::unordered_set<PyObject*> seen_;
  std::vector<std::shared_ptr<Mirror>> followed_;
  std::vector<PlainEntry> plain_;
};

}  // namespace fsdp::python
