#include "shown/shown_params.hpp"

#include <algorithm>

namespace fsdp::python {

void ShownParams::show_as(Shows form) const {
  for (const auto& param : params_) {
    if (form == Shows::kUnsharded) param->forms().show_unsharded();
    if (form == Shows::kSharded) param->forms().show_sharded();
    if (form == Shows::kPostForward) param->show_post_forward(post_forward_mesh_);
  }
}

void ShownParams::set_post_forward_mesh(PostForwardMesh mesh) {
  post_forward_mesh_ = std::move(mesh);
  for (const auto& param : params_) param->forms().drop_post_forward();
}

bool ShownParams::have_hooks() const {
  return std::ranges::any_of(params_, [](const auto& param) { return param->sharded().holds_subclass(); });
}

bool ShownParams::require_grad() const {
  return std::ranges::any_of(params_, [](const auto& param) {
    const auto& local_tensor = param->sharded().local_tensor();
    return local_tensor.defined() && local_tensor.requires_grad();
  });
}

}  // namespace fsdp::python
