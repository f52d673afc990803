#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "schedule/shows.hpp"
#include "shown/shown_param.hpp"

namespace fsdp::python {

/// The parameters of one call of fully_shard, which its modules show in one form, all of them.
///
/// Every function needs the interpreter's lock.
class ShownParams {
 public:
  /// In the place of those there were.
  void set(std::vector<std::shared_ptr<ShownParam>> params) { params_ = std::move(params); }
  const std::vector<std::shared_ptr<ShownParam>>& all() const { return params_; }

  void show_as(Shows form) const;
  /// How they show in kPostForward; no mesh: as they do outside.
  void set_post_forward_mesh(PostForwardMesh mesh);
  bool have_post_forward_mesh() const { return post_forward_mesh_.ranks > 0; }

  /// (the DTensor, its module's table, its name there) -> a HookedParameter, or None: see take_late_hooks. Null: there is none.
  void set_find_hooked(py::object find) { find_hooked_ = PyRef(std::move(find)); }
  const PyRef& find_hooked() const { return find_hooked_; }
  /// True if one of them is gathered by hooks of a user's.
  bool have_hooks() const;
  /// True if autograd would record what is computed from them.
  bool require_grad() const;
  /// A user has put other parameters in the place of some.
  bool are_replaced() const {
    return std::ranges::any_of(params_, [](const auto& param) { return param->forms().is_replaced(); });
  }
  void take_over() const {
    for (const auto& param : params_) param->take_over();
  }
  void show_gradients() const {
    for (const auto& param : params_) param->show_gradient();
  }

 private:
  std::vector<std::shared_ptr<ShownParam>> params_;
  PostForwardMesh post_forward_mesh_;
  PyRef find_hooked_;
};

}  // namespace fsdp::python
