#pragma once

#include <optional>
#include <string>

#include "fsdp/launch_environment.hpp"

/// Every environment variable that the library reads, and no other file reads one. Each call asks
/// the environment anew; a variable that is set but empty counts as unset.
namespace fsdp::environment {

/// FSDP_LOG_LEVEL; default "warn".
std::string log_level();
bool is_log_level_set();

/// FSDP_FAKE_ALL_GATHER and FSDP_FAKE_REDUCE: leave the collectives out, to see what they cost.
/// True for 1, true, yes and on; throws UsageError for anything that is neither that nor its
/// opposite.
bool fakes_all_gather();
bool fakes_reduce();

/// FSDP_COPY_ON_CPU: CPUOffloadPolicy copies on a mesh of CPUs too, as it does where there is a device.
bool copies_on_cpu();

/// FSDP_USE_FULL_PREC_IN_EVAL, FSDP1's: as with full_precision_in_eval in every policy.
bool computes_in_full_precision_in_eval();

/// TORCH_DISTRIBUTED_DEBUG=DETAIL, in any case: ranks compare their schedules before every collective.
bool debugs_in_detail();
/// FSDP_SCHEDULE_CHECK; default true. False: ranks never compare their schedules.
bool checks_schedule();

/// FSDP_NVTX: a root's ranges are NVTX ranges, too.
bool shows_nvtx();

/// FSDP_SANITIZE and FSDP_SANITIZE_SEED (default 1): see SanitizerOptions.
bool sanitizes();
int sanitizer_seed();

/// Where the ranks meet, for init_method "env://".
struct Rendezvous {
  std::optional<std::string> master_addr;  ///< MASTER_ADDR
  std::optional<int> master_port;          ///< MASTER_PORT
  /// TORCHELASTIC_USE_AGENT_STORE: torchrun's agent serves the store already, no rank does.
  bool agent_hosts_store = false;
  /// TORCHELASTIC_RESTART_COUNT: workers that were restarted meet under other keys.
  int restart_count = 0;
};

/// Throws UsageError naming the variable if a number is malformed.
Rendezvous rendezvous();

/// GLOO_SOCKET_IFNAME: the interfaces that gloo binds to, separated by commas.
std::optional<std::string> gloo_interfaces();

}  // namespace fsdp::environment
