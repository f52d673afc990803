#include "support/device_ranks.hpp"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <cstdlib>
#include <numeric>

#include "dispatch/meta_factory.hpp"

namespace fsdp::test {
namespace {

constexpr auto kKey = c10::DispatchKey::TESTING_ONLY_GenericMode;

std::string variable(const char* name, const std::string& otherwise = {}) {
  const char* value = std::getenv(name);
  return value ? value : otherwise;
}

/// CPU: all are where they would be.
thread_local c10::DeviceType placed_on = c10::DeviceType::CPU;

void place_on(c10::DeviceType type) {
  placed_on = type;
  c10::impl::tls_set_dispatch_key_included(kKey, type != c10::DeviceType::CPU);
}

/// What a given generator draws stays on that one's device, with all that the operator calls.
void place_on_device(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t first = stack->size() - schema.arguments().size();
  const auto position = schema.argumentIndexWithName("device"), generator = schema.argumentIndexWithName("generator");
  const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey);
  if (generator && !(*stack)[first + static_cast<size_t>(*generator)].isNone()) {
    const c10::impl::ExcludeDispatchKeyGuard everything_below(kKey);
    return op.redispatchBoxed(below, stack);
  }
  if (position && !takes_tensors(schema)) {
    auto& device = (*stack)[first + static_cast<size_t>(*position)];
    if (device.isNone()) device = c10::Device(placed_on);
  }
  op.redispatchBoxed(below, stack);
}

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericMode, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&place_on_device>());
}

/// A world that is no default one: tests make and leave default worlds of their own.
std::shared_ptr<Communicator> world_of(const ProcessGroupOptions& options) {
  destroy_process_group();
  auto world = init_process_group(options);
  destroy_process_group();
  return world;
}

const OnTestDevice kMainThread;  // which runs the tests

}  // namespace

c10::DeviceType test_device() {
  static const auto type = variable("FSDP_TEST_DEVICE", "cpu") == "cuda" ? c10::DeviceType::CUDA : c10::DeviceType::CPU;
  return type;
}

OnTestDevice::OnTestDevice(c10::DeviceType type) : before_(placed_on) { place_on(type); }

OnTestDevice::~OnTestDevice() { place_on(before_); }

std::optional<int> rank_processes() {
  const auto text = variable("FSDP_TEST_RANKS");
  return text.empty() ? std::nullopt : std::optional<int>(std::stoi(text));
}

std::shared_ptr<Communicator> process_world(std::chrono::milliseconds timeout) {
  static const bool is_host = test_device() == c10::DeviceType::CPU;
  static const auto world = world_of({.backend = is_host ? "gloo" : "nccl",
                                      .init_method = "file://" + variable("FSDP_TEST_STORE"),
                                      .rank = std::stoi(variable("FSDP_TEST_RANK", "0")),
                                      .world_size = rank_processes().value_or(1),
                                      .timeout = timeout,
                                      .use_copy_engine_all_gather = variable("FSDP_TEST_COPY_ENGINE") == "1"});
  return world;
}

std::shared_ptr<Communicator> group_of_all() {
  static int made = 0;
  const auto world = process_world();
  std::vector<int> members(world->size());
  std::iota(members.begin(), members.end(), 0);
  return world->split(members, fmt::format("all{}", made++));
}

std::shared_ptr<Communicator> fresh_process_group(int ranks) {
  return ranks == 1 ? world_of({.backend = "single", .world_size = 1}) : group_of_all();
}

}  // namespace fsdp::test
