#include "api/recompute/replay_environment.hpp"

#include <ATen/ATen.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/autocast_mode.h>

#include <cstring>
#include <mutex>
#include <unordered_set>

#include "api/shard/open_scopes.hpp"
#include "base/log.hpp"
#include "fsdp/forward_scope.hpp"
#include "module/handles.hpp"
#include "module/state/module_state.hpp"

namespace fsdp {

namespace {

at::Tensor state_of(at::Generator generator) {
  std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

bool is_same(const at::Tensor& a, const at::Tensor& b) {
  return a.nbytes() == b.nbytes() &&
         std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

/// The CPU's, and those of every device that has been used.
std::vector<at::Generator> default_generators() {
  auto& context = at::globalContext();
  std::vector<at::Generator> generators{context.defaultGenerator(at::kCPU)};
  const auto type = at::getAccelerator();
  if (!type || *type == at::kMPS) return generators;
  const auto& device = context.getAcceleratorHooksInterface(*type);
  for (c10::DeviceIndex i = 0; i < device.deviceCount(); ++i)
    if (device.hasPrimaryContext(i))
      generators.push_back(context.defaultGenerator(c10::Device(*type, i)));
  return generators;
}

std::vector<at::Generator> generators_of(const ActivationCheckpointOptions& options) {
  auto generators =
      options.preserve_rng_state ? default_generators() : std::vector<at::Generator>();
  generators.insert(generators.end(), options.generators.begin(), options.generators.end());
  return generators;
}

/// What normalisations of LibTorch's update in forward.
std::vector<at::Tensor> running_statistics(const torch::nn::Module& module) {
  static const std::unordered_set<std::string> names{"running_mean", "running_var",
                                                     "num_batches_tracked"};
  std::vector<at::Tensor> found;
  for (const auto& item : module.named_buffers()) {
    const auto& path = item.key();
    const auto dot = path.rfind('.');
    if (item.value().defined() &&
        names.contains(dot == std::string::npos ? path : path.substr(dot + 1)))
      found.push_back(item.value());
  }
  return found;
}

}  // namespace

GeneratorStates::GeneratorStates(std::vector<at::Generator> generators)
    : generators_(std::move(generators)) {
  for (const auto& generator : generators_) states_.push_back(state_of(generator));
}

void GeneratorStates::restore() const {
  for (size_t i = 0; i < generators_.size(); ++i) {
    auto generator = generators_[i];
    std::lock_guard lock(generator.mutex());
    generator.set_state(states_[i]);
  }
}

void GeneratorStates::drop_unchanged() {
  GeneratorStates changed;
  for (size_t i = 0; i < generators_.size(); ++i) {
    if (is_same(state_of(generators_[i]), states_[i])) continue;
    changed.generators_.push_back(generators_[i]);
    changed.states_.push_back(states_[i]);
  }
  *this = std::move(changed);
}

AutocastState::AutocastState() : caches_(at::autocast::is_autocast_cache_enabled()) {
  for (const auto type : at::autocast::_AUTOCAST_SUPPORTED_DEVICES)
    devices_.push_back(
        {type, at::autocast::is_autocast_enabled(type), at::autocast::get_autocast_dtype(type)});
}

void AutocastState::restore() const {
  for (const auto& [type, enabled, dtype] : devices_) {
    at::autocast::set_autocast_enabled(type, enabled);
    at::autocast::set_autocast_dtype(type, dtype);
  }
  at::autocast::set_autocast_cache_enabled(caches_);
}

ReplayEnvironment::ReplayEnvironment(const ActivationCheckpointOptions& options,
                                     const torch::nn::Module* module)
    : generators_(generators_of(options)),
      buffers_(options.buffers),
      module_(module),
      scopes_(open_scopes()) {}

ReplayEnvironment::Restored::Restored(const ReplayEnvironment& environment)
    : generators_(environment.generators_.generators()) {
  auto buffers = environment.buffers_;
  if (environment.module_ != nullptr)
    for (auto& buffer : running_statistics(*environment.module_)) buffers.push_back(buffer);
  // By way of a tensor with a version of its own: what autograd has saved of them elsewhere stays
  // valid.
  at::NoGradGuard no_grad;
  for (const auto& buffer : buffers)
    buffers_.emplace_back(buffer.variable_data(), buffer.detach().clone());
  for (const auto& scope : environment.scopes_)
    if (auto state = scope.lock())
      scopes_.push_back(std::make_unique<ForwardScope>(handles::module(std::move(state))));
  environment.generators_.restore();
  environment.autocast_.restore();
  at::autocast::increment_nesting();
}

ReplayEnvironment::Restored::~Restored() {
  // Weights that were cast in here belong to the recomputation's graph.
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  autocast_.restore();
  try {
    generators_.restore();
    at::NoGradGuard no_grad;
    for (const auto& [buffer, values] : buffers_) buffer.copy_(values);
  } catch (const std::exception& error) {
    log().error("fsdp::activation_checkpoint: random generators or buffers were not restored after a recomputation: {}",
                error.what());
  }
}

}  // namespace fsdp
