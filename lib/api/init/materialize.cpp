#include "fsdp/materialize.hpp"

#include <ATen/ATen.h>

#include "api/init/init_run.hpp"
#include "api/state_dict/named_states.hpp"
#include "base/require.hpp"
#include "param/replace_tensor.hpp"
#include "root/group_conversion.hpp"

namespace fsdp {

namespace {

void allocate_plain(const at::Tensor& tensor, c10::Device device) {
  if (!tensor.is_meta()) return;
  tensor.mutable_grad().reset();
  // zeros_like would lose the meta tensor's strides only where they have gaps.
  replace_tensor(tensor, at::zeros_like(tensor.detach(),
                                        tensor.options().device(device).requires_grad(false)));
}

void allocate(const ModuleTree& tree, std::optional<c10::Device> device) {
  for (const auto& group : tree.groups)
    if (group->parts().config.device.is_meta())
      fsdp::convert(*group, {.device = group->identity().mesh_info.mesh.device()});
  if (!device)
    device = tree.groups.empty() ? c10::Device(at::kCPU)
                                 : tree.groups.front()->identity().mesh_info.mesh.device();
  torch::NoGradGuard no_grad;
  for (const auto& entry : tree.parameters)
    if (!entry.group) allocate_plain(entry.tensor, *device);
  for (const auto& entry : tree.buffers) allocate_plain(entry.tensor, *device);
}

}  // namespace

void materialize(torch::nn::Module& module, const InitOptions& options) {
  InitRun run(walk_tree(module, "fsdp::materialize"), options, InitRun::Targets::kMeta,
              "fsdp::materialize");
  run.rehearse();
  allocate(run.tree(), std::nullopt);
  run.run();
}

void to_empty(torch::nn::Module& module, std::optional<c10::Device> device) {
  allocate(walk_tree(module, "fsdp::to_empty"), device);
}

void init_parameters(torch::nn::Module& module, const InitOptions& options) {
  require_not_shown(module, "fsdp::init_parameters");
  auto tree = walk_tree(module, "fsdp::init_parameters");
  for (const auto& entry : tree.parameters)
    require(!entry.tensor.is_meta(),
            "fsdp::init_parameters: {} is on the meta device and has no memory; use "
            "fsdp::materialize, or "
            "call fsdp::to_empty first",
            entry.name);
  InitRun run(std::move(tree), options, InitRun::Targets::kAll, "fsdp::init_parameters");
  run.rehearse();
  run.run();
}

}  // namespace fsdp
