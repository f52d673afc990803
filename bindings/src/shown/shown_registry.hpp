#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <unordered_map>

#include "py_entry.hpp"

namespace fsdp::python {

class ShownParam;

/// Which parameters there are that Python shows, by what they are looked for. Guarded by the interpreter's lock.
class ShownRegistry {
 public:
  void add(const std::shared_ptr<ShownParam>& shown);
  void add(const PyEntry& place, const ShownParam& shown) { by_place_[place] = &shown; }
  /// With all its places.
  void remove(const ShownParam& shown);

  /// Null if there is none.
  std::shared_ptr<ShownParam> find(const at::Tensor& local_tensor) const;
  /// All there are, by the DTensors that stand for them: as much work as there are parameters.
  std::unordered_map<const c10::TensorImpl*, std::shared_ptr<ShownParam>> all_by_dtensor() const;
  /// DTensors have been put in others' places: which of them stand for several parameters now. As much work again.
  void settle_ties() const;
  /// True if one of them has that entry.
  bool has(const PyEntry& place) const { return by_place_.contains(place); }
  /// True if `dtensor` stands for one of them. As much work as there are parameters.
  bool is_shown(const at::Tensor& dtensor) const;
  /// True if `tensor` is what one of them shows, or may show, at that entry.
  bool shows_at(const at::Tensor& tensor, const PyEntry& place) const;

 private:
  std::unordered_map<const c10::TensorImpl*, std::weak_ptr<ShownParam>> by_local_tensor_;
  std::map<PyEntry, const ShownParam*> by_place_;
};

/// The process's.
ShownRegistry& shown_registry();

}  // namespace fsdp::python
