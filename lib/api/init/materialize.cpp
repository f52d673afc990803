#include "fsdp/materialize.hpp"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <exception>
#include <unordered_map>

#include "api/init/init_run.hpp"
#include "api/state_dict/named_states.hpp"
#include "base/require.hpp"
#include "param/replace_tensor.hpp"
#include "root/edit/group_conversion.hpp"

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

/// Calls what a program has given for a module. What it throws says which module that was, and keeps its type if it can.
bool apply_named(const ModuleInitializer& given, torch::nn::Module& module, Initializer& init, const std::string& subject) {
  try {
    return given.apply(module, init);
  } catch (c10::Error& error) {
    error.add_context(subject);
    throw;
  } catch (const UsageError& error) {
    throw UsageError(subject + ": " + error.what());
  } catch (const std::exception& error) {
    std::throw_with_nested(UsageError(subject + ": " + error.what()));
  }
}

/// The same, with initializers whose exceptions name the module.
InitOptions naming_modules(const InitOptions& options, const ModuleTree& tree, const char* caller) {
  auto names = std::make_shared<std::unordered_map<const torch::nn::Module*, std::string>>();
  for (const auto& [module, path] : tree.modules)
    names->emplace(module, fmt::format("{}: the initializer of {} ({})", caller,
                                       path.empty() ? "the module" : "'" + path + "'", module->name()));
  InitOptions named{.seed = options.seed};
  for (const auto& given : options.initializers)
    named.initializers.push_back({[given, names](torch::nn::Module& module, Initializer& init) {
      return apply_named(given, module, init, names->at(&module));
    }});
  return named;
}

}  // namespace

void materialize(torch::nn::Module& module, const InitOptions& options) {
  auto tree = walk_tree(module, "fsdp::materialize");
  const auto named = naming_modules(options, tree, "fsdp::materialize");
  InitRun run(std::move(tree), named, InitRun::Targets::kMeta, "fsdp::materialize");
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
  const auto named = naming_modules(options, tree, "fsdp::init_parameters");
  InitRun run(std::move(tree), named, InitRun::Targets::kAll, "fsdp::init_parameters");
  run.rehearse();
  run.run();
}

}  // namespace fsdp
