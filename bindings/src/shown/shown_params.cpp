#include "shown/shown_params.hpp"

#include <ATen/core/grad_mode.h>

#include <algorithm>

namespace fsdp::python {

void ShownParams::show_as(Form form) {
  form_ = form;
  for (const auto& param : params_) {
    if (form == Form::kUnsharded) param->forms().show_unsharded();
    if (form == Form::kSharded) param->forms().show_sharded();
    if (form == Form::kPostForward) param->show_post_forward(post_forward_mesh_);
  }
}

ShownParams::Form ShownParams::released_form() const {
  return at::GradMode::is_enabled() && post_forward_mesh_.ranks > 0 ? Form::kPostForward : Form::kSharded;
}

void ShownParams::set_post_forward_mesh(PostForwardMesh mesh) {
  if (form_ == Form::kPostForward) show_as(Form::kSharded);
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
