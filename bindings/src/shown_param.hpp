#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "dispatch/dtensor_dispatch.hpp"
#include "dtensor_handle.hpp"
#include "mirror.hpp"
#include "py_ref.hpp"

namespace fsdp::python {

/// Between forward and backward parameters may be kept as shards of a part of the ranks.
struct PostForwardMesh {
  py::object mesh;  ///< torch's, of two dimensions: replicate, shard; None: parameters are not kept so
  int rank = 0, ranks = 0;  ///< of the shard dimension
};

/// Who uses a parameter in operators: the module that it was sharded with.
class ParamUser {
 public:
  virtual ~ParamUser() = default;
  /// An operator outside forward is to have the parameter.
  virtual void before_use() = 0;
  /// A hook behind a gradient is about to run, amid backward.
  virtual void before_hook() = 0;
  virtual bool casts_inputs() const = 0;
};

/// A sharded parameter as Python shows it: its modules' tables hold the DTensor over the registered
/// parameter's memory, or, inside forward, the parameter that was there before, which is the core's unsharded parameter.
/// Gradients of the sharded parameter appear as the DTensor parameter's `.grad`.
///
/// The DTensor stands in for the unsharded parameter: see Note [Stand-ins].
///
/// Every function needs the interpreter's lock.
class ShownParam {
 public:
  /// sharded: the DTensor parameter. unsharded: the unsharded parameter, which modules compute with, or, unless it is null, with
  /// what `dtensor` makes of it.
  ShownParam(at::Tensor registered, py::object unsharded, py::object sharded, const DTensorMaker& maker,
             std::unique_ptr<DTensorHandle> dtensor = nullptr);
  ~ShownParam();
  ShownParam(const ShownParam&) = delete;
  ShownParam& operator=(const ShownParam&) = delete;

  /// By its sharded tensor; null if there is none.
  static std::shared_ptr<ShownParam> find(const at::Tensor& registered);
  /// All there are, by the DTensor parameters that stand for them: as much work as there are parameters.
  static std::unordered_map<const c10::TensorImpl*, std::shared_ptr<ShownParam>> all_by_shown();
  static void remember(const std::shared_ptr<ShownParam>& self);
  void set_user(std::weak_ptr<ParamUser> user) { user_ = std::move(user); }
  /// True if `tensor` is what one of them shows, or may show, at that entry.
  static bool shows_at(const at::Tensor& tensor, const Place& place);

  /// `place` shows this parameter from now on, the sharded one first.
  void add_place(const Place& place);
  void show_sharded() const { show(sharded_); }
  void show_unsharded() const;
  /// As shards of fewer ranks; a parameter that is not cut shows as it does outside.
  void show_post_forward(const PostForwardMesh& mesh);
  /// The mesh is another one from now on.
  void drop_post_forward() { post_forward_ = PyRef(); }

  /// Takes over what the user has changed on the DTensor since the last call: requires_grad, grad_dtype, a gradient
  /// that was dropped or replaced.
  void take_over();
  /// Before `nn.Module._apply`, which makes tensors without a grad_dtype and other gradients.
  void before_apply();
  /// Puts the sharded parameter's gradient on the DTensor.
  void show_gradient();
  /// After `nn.Module._apply` (to, to_empty, float...): the DTensor parameter that stands in the table now may
  /// have another local tensor, on another device or in another dtype.
  at::Tensor applied_local();
  /// Throws TypeError if no DTensor stands there; before any `applied_local` of a module.
  void check_applied() const;
  /// True if a user has put another parameter in the place of the sharded one, which is to be shown now.
  bool is_replaced() const;
  /// The sharded parameter holds the values: the DTensor shows its memory again.
  void point_home();
  /// The same if the sharded parameter lies in other memory now than when the DTensor was made.
  void follow_home();

  const at::Tensor& sharded_param() const { return sharded_param_; }
  py::object sharded() const { return sharded_.object(); }
  py::object unsharded() const { return unsharded_.object(); }
  /// For a copy of the parameter with this unsharded parameter; null where modules compute with the unsharded parameter itself.
  std::unique_ptr<DTensorHandle> dtensor_over(at::Tensor handle) const {
    return dtensor_ ? dtensor_->over(std::move(handle)) : nullptr;
  }

 private:
  class ForOperators;
  /// A table that it stands in, and its key there as a Python string. Both are held: the module may go before.
  struct HeldPlace {
    Place place;
    PyRef table, key;
  };
  void stand_in(const PyRef& parameter);
  PyObject* entry() const;
  bool is_ours(const PyObject* parameter) const;
  void take_over_requires_grad() const;
  void take_over_grad_dtype() const;
  void take_over_gradient();
  void follow_requires_grad() const;
  void show(const PyRef& parameter) const;
  static void put(const HeldPlace& held, const PyRef& parameter);
  void watch_gradient();
  void run_hooks_in_backward();
  void run_hooks();
  class GradientWatch;
  void put_gradient(const at::Tensor& gradient);
  void take_autograds_own(const at::Tensor& gradient);
  bool shows_our_gradient() const;
  void follow_gradient(const at::Tensor& gradient, const at::Tensor& local);
  void forget_gradient();
  class GradientEnd;

  /// What the tables hold inside forward.
  const PyRef& computed() const { return dtensor_ ? dtensor_->parameter() : unsharded_; }

  at::Tensor sharded_param_;
  PyRef unsharded_, sharded_;
  std::unique_ptr<DTensorHandle> dtensor_;
  PyRef post_forward_;  ///< made when it is first shown
  std::weak_ptr<ParamUser> user_;
  std::weak_ptr<ShownParam> self_;
  /// The DTensor that was last on sharded_ as its gradient; whoever drops it gives the memory back, so nothing here
  /// keeps it, and GradientEnd tells when it has gone.
  const c10::TensorImpl* gradient_ = nullptr;
  const c10::TensorImpl* shown_gradient_ = nullptr;  ///< the sharded parameter's, which gradient_ shows
  bool is_watched_ = false;  ///< hooks of the user's are to run when a gradient comes
  const c10::StorageImpl* home_;  ///< of the memory that the DTensor shows
  bool is_scalar_;  ///< without dimensions
  const DTensorMaker& maker_;
  std::vector<HeldPlace> places_;
};

}  // namespace fsdp::python
