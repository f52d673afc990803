#include "fsdp/fully_shard.hpp"
#include "fsdp/statistics.hpp"

#include "base/require.hpp"
#include "module/attach.hpp"
#include "module/handles.hpp"
#include "module/module_access.hpp"
#include "module/state/module_table.hpp"

namespace fsdp {

FSDPModule fully_shard(torch::nn::Module& module, const FullyShardOptions& options) {
  return handles::module(attach({&module}, options));
}

FSDPModule fully_shard(const std::vector<std::shared_ptr<torch::nn::Module>>& modules,
                       const FullyShardOptions& options) {
  std::vector<torch::nn::Module*> raw;
  raw.reserve(modules.size());
  for (const auto& module : modules) raw.push_back(module.get());
  return handles::module(attach(raw, options));
}

std::optional<FSDPModule> find_fsdp_module(const torch::nn::Module& module) {
  auto state = find_state(module);
  if (!state) return std::nullopt;
  return handles::module(std::move(state));
}

namespace {
void find_roots(const torch::nn::Module& module, std::vector<FSDPModule>& found) {
  if (auto state = find_state(module)) {
    const bool is_known = std::any_of(found.begin(), found.end(), [&](const FSDPModule& known) {
      return handles::shared_state(known) == state;
    });
    if (!is_known) found.push_back(handles::module(std::move(state)));
    return;
  }
  for (const auto& child : module.children()) find_roots(*child, found);
}
}  // namespace

std::vector<FSDPModule> roots(const torch::nn::Module& module) {
  std::vector<FSDPModule> found;
  find_roots(module, found);
  return found;
}

ParameterBytes parameter_bytes(const FSDPModule& root) {
  auto& context = *handles::state(root).root()->context();
  const auto& comm_ctx = context.runner().comm_ctx();
  ParameterBytes bytes{.sharded = 0,
                       .unsharded = comm_ctx.meter.unsharded_bytes(),
                       .peak_unsharded = comm_ctx.meter.peak_unsharded_bytes(),
                       .symmetric = comm_ctx.gather_slots.bytes() + comm_ctx.reduction_slots.bytes()};
  for (const auto* group : context.runner().groups()) {
    bytes.sharded += group->parts().layout.stored().rank_bytes();
    bytes.kept += group->unsharder().memory().kept_bytes();
  }
  return bytes;
}

StepStatistics statistics(const FSDPModule& module) {
  return handles::state(module).root()->context()->runner().comm_ctx().meter.total();
}

double exposed_wait_ms(const FSDPModule& module) {
  constexpr double kNsPerMs = 1e6;
  return static_cast<double>(handles::state(module).root()->context()->runner().comm_ctx().meter.step_wait_ns()) / kNsPerMs;
}

}  // namespace fsdp
