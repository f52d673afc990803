#include "fsdp/process_group.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <numeric>

#include "base/log.hpp"
#include "base/require.hpp"
#include "comm/backend_factory.hpp"
#include "comm/c10d/transport_error.hpp"
#include "comm/default_backend.hpp"
#include "comm/default_world.hpp"
#include "comm/nccl/nccl_backend.hpp"
#include "comm/nccl/nccl_communicator.hpp"
#include "comm/rendezvous.hpp"
#include "comm/single_rank.hpp"
#include "comm/threads/thread_ranks.hpp"

namespace fsdp {
namespace {

struct DefaultWorld {
  std::mutex mutex;
  std::shared_ptr<Communicator> world;
  std::shared_ptr<const void> companion;
};

DefaultWorld& default_world() {
  // Never destroyed: static objects of the program may still hold groups and ask for it.
  static auto* holder = new DefaultWorld;
  return *holder;
}

/// The options with everything filled in from the launcher.
struct WorldPlan {
  std::string backend;
  RendezvousOptions rendezvous;
  LaunchEnvironment launch;
  bool use_copy_engine_all_gather = false;
};

WorldPlan plan_world(const ProcessGroupOptions& options) {
  WorldPlan plan;
  plan.launch = launch_environment();
  const bool is_launched = plan.launch.launcher != "none";
  require(is_launched || options.rank.has_value() == options.world_size.has_value() ||
              options.world_size == 1,
          "init_process_group: {} was given without {}, and no launcher sets it; pass both",
          options.rank ? "rank" : "world_size", options.rank ? "world_size" : "rank");
  const int world_size = options.world_size.value_or(plan.launch.world_size);
  const int rank = options.rank.value_or(options.world_size == 1 ? 0 : plan.launch.rank);
  require(world_size >= 1 && rank >= 0 && rank < world_size,
          "init_process_group: expected a rank from 0 to world_size - 1, found rank {} of {}", rank,
          world_size);
  constexpr std::array<std::string_view, 5> kBackends = {"", "gloo", "nccl", "c10d_nccl", "single"};
  require(std::find(kBackends.begin(), kBackends.end(), options.backend) != kBackends.end(),
          "init_process_group: expected backend gloo, nccl, c10d_nccl or single, found '{}'", options.backend);
  require(
      options.backend != "single" || world_size == 1,
      "init_process_group: backend single is a world of one rank, found world_size {}; use gloo "
      "or nccl",
      world_size);
  require(options.timeout.count() > 0,
          "init_process_group: the timeout must be positive, found {} ms", options.timeout.count());
  plan.rendezvous = {.init_method = options.init_method.empty() ? "env://" : options.init_method,
                     .rank = rank,
                     .world_size = world_size,
                     .timeout = options.timeout};
  plan.backend = options.backend;
  if (plan.backend.empty())
    plan.backend = default_backend(world_size, world_size > 1 && has_nccl(plan.launch.local_world_size));
  require(!options.use_copy_engine_all_gather || plan.backend == "nccl" || plan.backend == "single",
          "init_process_group: use_copy_engine_all_gather needs backend nccl, found {}; set it to false", plan.backend);
  plan.use_copy_engine_all_gather = options.use_copy_engine_all_gather;
  return plan;
}

std::shared_ptr<Communicator> make_c10d_world(const WorldPlan& plan, const MeetingPlace& place) {
  const RendezvousOptions& where = plan.rendezvous;
  const bool is_nccl = plan.backend == "c10d_nccl";
  const auto make_backend = backend_factory(is_nccl ? "nccl" : plan.backend,
                                            {.timeout = where.timeout, .loopback = place.is_loopback});
  std::vector<int> ranks(where.world_size);
  std::iota(ranks.begin(), ranks.end(), 0);
  return c10d_communicator({.backend = make_backend(place.store, where.rank, where.world_size),
                            .world_ranks = std::move(ranks),
                            .name = "world",
                            .device_type = is_nccl ? c10::DeviceType::CUDA : c10::DeviceType::CPU,
                            .store = place.store,
                            .make_backend = make_backend,
                            .launches_batches = true,
                            .packs_below = is_nccl ? kNcclPacksBelow : kGlooPacksBelow});
}

std::shared_ptr<Communicator> make_connected_world(const WorldPlan& plan) {
  const RendezvousOptions& where = plan.rendezvous;
  if (plan.backend != "gloo") choose_cuda_device(plan.launch.local_rank);
  const MeetingPlace place = meet(where);
  try {
    if (plan.backend != "nccl") return make_c10d_world(plan, place);
    return make_nccl_communicator({.store = place.store,
                                   .rank = where.rank,
                                   .size = where.world_size,
                                   .timeout = where.timeout,
                                   .use_copy_engine_all_gather = plan.use_copy_engine_all_gather});
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    throw join_error(where, fmt::format(" with {} at {}: {}", plan.backend, where.init_method, transport_error(error.what())));
  }
}

std::shared_ptr<Communicator> make_world(const ProcessGroupOptions& options) {
  const WorldPlan plan = plan_world(options);
  set_log_rank(plan.rendezvous.rank);
  if (plan.backend != "single") return make_connected_world(plan);
  // Alone, the tensors belong where the compute is.
  const bool has_cuda = has_nccl(/*devices=*/1);
  if (has_cuda) choose_cuda_device(plan.launch.local_rank);
  return single_rank_on(has_cuda ? c10::DeviceType::CUDA : c10::DeviceType::CPU);
}

}  // namespace

std::shared_ptr<Communicator> init_process_group(const ProcessGroupOptions& options) {
  DefaultWorld& holder = default_world();
  std::lock_guard lock(holder.mutex);
  require_state(holder.world == nullptr,
                "init_process_group: there is a default world already ({} of {} ranks); call "
                "destroy_process_group() first",
                holder.world ? holder.world->backend() : "",
                holder.world ? holder.world->size() : 0);
  holder.world = make_world(options);
  return holder.world;
}

std::shared_ptr<Communicator> default_process_group() {
  require_state(!runs_as_thread_rank(),
                "default_process_group: ranks that are threads share no default world; pass the "
                "communicator, or a mesh made from it");
  DefaultWorld& holder = default_world();
  std::lock_guard lock(holder.mutex);
  if (!holder.world) holder.world = make_world({});
  return holder.world;
}

bool is_initialized() {
  DefaultWorld& holder = default_world();
  std::lock_guard lock(holder.mutex);
  return holder.world != nullptr;
}

void destroy_process_group() {
  DefaultWorld& holder = default_world();
  std::lock_guard lock(holder.mutex);
  holder.companion = nullptr;
  holder.world = nullptr;
}

std::shared_ptr<const void> with_default_world(
    const std::function<std::shared_ptr<const void>(const std::shared_ptr<Communicator>&)>& make) {
  const auto world = default_process_group();
  DefaultWorld& holder = default_world();
  std::lock_guard lock(holder.mutex);
  if (!holder.companion) holder.companion = make(world);
  return holder.companion;
}

}  // namespace fsdp
