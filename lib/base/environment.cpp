#include "base/environment.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdlib>
#include <limits>
#include <string_view>

#include "base/require.hpp"

namespace fsdp {
namespace environment {
namespace {

std::optional<std::string> read(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr || *value == '\0') return std::nullopt;
  return std::string(value);
}

std::optional<int> read_int(const char* name, int lowest,
                            int highest = std::numeric_limits<int>::max()) {
  const auto text = read(name);
  if (!text) return std::nullopt;
  int value = 0;
  const char* end = text->data() + text->size();
  const auto [stop, error] = std::from_chars(text->data(), end, value);
  require(error == std::errc() && stop == end && value >= lowest && value <= highest,
          "{}: expected an integer from {} to {}, found '{}'; unset it or start with a launcher",
          name, lowest, highest, *text);
  return value;
}

void make_lower(std::string& text) {
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
}

bool read_flag(const char* name, bool when_unset = false) {
  auto text = read(name);
  if (!text) return when_unset;
  make_lower(*text);
  constexpr std::array<std::string_view, 5> yes = {"1", "true", "yes", "on", "y"};
  constexpr std::array<std::string_view, 5> no = {"0", "false", "no", "off", "n"};
  const bool is_yes = std::find(yes.begin(), yes.end(), *text) != yes.end();
  require(is_yes || std::find(no.begin(), no.end(), *text) != no.end(),
          "{}: expected 0 or 1, found '{}'", name, *text);
  return is_yes;
}

/// The variables one launcher sets. `local_world_size` may list one number per node (Slurm).
struct LauncherVariables {
  const char* launcher;
  const char* rank;
  const char* world_size;
  const char* local_rank;
  const char* local_world_size;
};

// torchrun first: it may itself run under mpirun or srun, one agent a node. Hydra's PMI variables
// stand for MPICH and Intel MPI. SLURM_STEP_* exists only inside srun; the plain SLURM_NTASKS is
// there in a batch script too, whose process is no rank.
constexpr std::array<LauncherVariables, 4> kLaunchers = {{
    {"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"},
    {"mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE"},
    {"mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"},
    {"srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", nullptr},
}};

/// Tasks of this node out of SLURM_STEP_TASKS_PER_NODE, such as "4(x2),3": four on each of the
/// first two nodes, three on the third.
std::optional<int> slurm_local_world_size() {
  const auto text = read("SLURM_STEP_TASKS_PER_NODE");
  const int node = read_int("SLURM_NODEID", 0).value_or(0);
  if (!text) return std::nullopt;
  int first_node = 0;
  size_t at = 0;
  while (at <= text->size()) {
    const size_t stop = std::min(text->find(',', at), text->size());
    const std::string entry = text->substr(at, stop - at);
    int tasks = 0;
    int nodes = 1;
    const char* end = entry.data() + entry.size();
    auto [next, error] = std::from_chars(entry.data(), end, tasks);
    bool good = error == std::errc() && tasks > 0;
    if (good && next != end) {
      good = std::string_view(next, end).starts_with("(x") && *(end - 1) == ')';
      if (good) good = std::from_chars(next + 2, end - 1, nodes).ec == std::errc() && nodes > 0;
    }
    require(good, "SLURM_STEP_TASKS_PER_NODE: expected counts such as 4(x2),3, found '{}'", *text);
    if (node < first_node + nodes) return tasks;
    first_node += nodes;
    at = stop + 1;
  }
  return std::nullopt;
}

LaunchEnvironment read_launcher(const LauncherVariables& names) {
  LaunchEnvironment found;
  found.launcher = names.launcher;
  found.world_size = *read_int(names.world_size, 1);
  found.rank = *read_int(names.rank, 0);
  require(found.rank < found.world_size, "{}: expected a rank below {} = {}, found {}", names.rank,
          names.world_size, found.world_size, found.rank);
  // A hand-made environment may name no local rank: then all ranks count as on one node.
  found.local_world_size =
      (names.local_world_size ? read_int(names.local_world_size, 1) : slurm_local_world_size())
          .value_or(found.world_size);
  found.local_rank = read_int(names.local_rank, 0).value_or(found.rank % found.local_world_size);
  require(found.local_rank < found.local_world_size,
          "{}: expected a local rank below the node's {} ranks, found {}", names.local_rank,
          found.local_world_size, found.local_rank);
  return found;
}

}  // namespace

std::string log_level() { return read("FSDP_LOG_LEVEL").value_or("warn"); }
bool is_log_level_set() { return read("FSDP_LOG_LEVEL").has_value(); }
bool fakes_all_gather() { return read_flag("FSDP_FAKE_ALL_GATHER"); }
bool fakes_reduce() { return read_flag("FSDP_FAKE_REDUCE"); }
bool shows_nvtx() { return read_flag("FSDP_NVTX"); }

bool copies_on_cpu() { return read_flag("FSDP_COPY_ON_CPU"); }
bool checks_schedule() { return read_flag("FSDP_SCHEDULE_CHECK", /*when_unset=*/true); }
bool computes_in_full_precision_in_eval() { return read_flag("FSDP_USE_FULL_PREC_IN_EVAL"); }
bool sanitizes() { return read_flag("FSDP_SANITIZE"); }
int sanitizer_seed() { return read_int("FSDP_SANITIZE_SEED", 0).value_or(1); }

bool debugs_in_detail() {
  auto level = read("TORCH_DISTRIBUTED_DEBUG");
  if (level) make_lower(*level);
  return level == "detail";
}

std::optional<std::string> gloo_interfaces() { return read("GLOO_SOCKET_IFNAME"); }

Rendezvous rendezvous() {
  Rendezvous found;
  found.master_addr = read("MASTER_ADDR");
  found.master_port = read_int("MASTER_PORT", 1, 65535);
  found.agent_hosts_store = read_flag("TORCHELASTIC_USE_AGENT_STORE");
  found.restart_count = read_int("TORCHELASTIC_RESTART_COUNT", 0).value_or(0);
  return found;
}

}  // namespace environment

LaunchEnvironment launch_environment() {
  using namespace environment;
  for (const LauncherVariables& names : kLaunchers) {
    const bool has_rank = read(names.rank).has_value();
    const bool has_size = read(names.world_size).has_value();
    if (has_rank && has_size) return read_launcher(names);
    // Half a torchrun environment was set by hand and half forgotten. Of the others a rank alone
    // is normal: SLURM_PROCID is set in a batch script, whose process is a world of its own.
    require(has_rank == has_size || &names != &kLaunchers.front(),
            "{} is set but {} is not; set both or neither",
            has_rank ? names.rank : names.world_size, has_rank ? names.world_size : names.rank);
  }
  return {};
}

}  // namespace fsdp
