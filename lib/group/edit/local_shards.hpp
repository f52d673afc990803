#pragma once

#include <ATen/core/Tensor.h>

#include <span>
#include <string>
#include <vector>

namespace fsdp {

struct FSDPParam;
class GroupLayout;
class ParamGroup;

/// The classes of a group whose parameters have been handed out as one tensor each: the same dtype,
/// trainable or not, and the same label. Fixed from then on. Not thread-safe: the root's lock guards it.
///
/// Invariant: a class's `shard` aliases its parameters' parts in this rank's shard, and after a reduction
/// its `.grad` those parts' gradients; what lies between the parts is zero in both.
class LocalShards {
 public:
  struct Class {
    std::string label;
    at::ScalarType dtype;
    bool is_trainable;
    std::vector<size_t> members = {};  ///< by their place in the shard
    int64_t begin = 0, numel = 0;      ///< elements of `dtype` in this rank's shard
    at::Tensor shard = {};             ///< 1-D, numel elements
    at::Tensor gradient = {};          ///< what the parameters' gradients are views of
    at::Tensor next_gradient = {};     ///< memory for the next one; undefined: it makes its own
  };

  /// The classes by the layout's order. labels: by parameter.
  static std::vector<Class> plan(const ParamGroup& group, const std::vector<std::string>& labels);

  LocalShards(std::vector<Class> classes, std::vector<std::string> labels);

  const std::vector<Class>& all() const { return classes_; }
  const std::vector<size_t>& members(size_t index) const { return classes_[index].members; }
  /// Parameters in the classes' order.
  std::vector<size_t> order() const;
  const std::vector<std::string>& labels() const { return labels_; }

  /// Where a class lies in a shard that is laid out so: bytes.
  struct ClassExtent {
    int64_t begin = 0, bytes = 0;
  };
  static ClassExtent extent_of(const Class& one, const GroupLayout& layout);
  /// Zeros for the next gradients, by class; undefined: that one makes its own.
  void give_gradients(std::vector<at::Tensor> memory);

  /// The tensors, the same ones if there are some, point into `memory` (this rank's shard, 1-D bytes).
  void point_into(ParamGroup& group, const at::Tensor& memory);

  /// Looks, before gradients are assigned: whoever reset a class's gradient, or a parameter's, has reset both.
  void refresh(ParamGroup& group);
  /// Where a parameter's part of the class's gradient lies, with the sizes of its rows.
  at::Tensor place(const ParamGroup& group, size_t param) const;
  /// The parameter's gradient, wherever it is, lies there from now on.
  void settle(ParamGroup& group, size_t param);
  void drop_gradients();
  bool is_trainable(size_t param) const { return class_of(param).is_trainable; }

  /// Throws StateError naming a parameter whose requires_grad has been toggled.
  void check_requires_grad(std::span<const FSDPParam> params) const;
  /// Throws StateError if a parameter's grad_dtype is not what it was then.
  void check_grad_dtypes(std::span<const FSDPParam> params) const;

 private:
  const Class& class_of(size_t param) const { return classes_[class_of_[param]]; }
  void begin_gradient(ParamGroup& group, Class& one);
  bool is_in_place(const ParamGroup& group, const Class& one, size_t param) const;

  std::vector<Class> classes_;
  std::vector<std::string> labels_;
  std::vector<size_t> class_of_;  // by parameter
};

/// One of the sharded parameters has a gradient.
bool have_gradients(std::span<const FSDPParam> params);

/// After the shard got other memory: classes that are handed out alias it, gradients that are there included.
void refresh_classes(ParamGroup& group);

}  // namespace fsdp
