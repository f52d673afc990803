#pragma once

#include <cstdlib>
#include <map>
#include <optional>
#include <string>

namespace fsdp::test {

using Variables = std::map<std::string, std::string>;

/// Sets environment variables, and removes every other one that a launcher or the library would
/// look at, until it goes out of scope.
class ScopedEnvironment {
 public:
  explicit ScopedEnvironment(const Variables& variables) {
    for (const char* name : {"RANK",
                             "WORLD_SIZE",
                             "LOCAL_RANK",
                             "LOCAL_WORLD_SIZE",
                             "OMPI_COMM_WORLD_RANK",
                             "OMPI_COMM_WORLD_SIZE",
                             "OMPI_COMM_WORLD_LOCAL_RANK",
                             "OMPI_COMM_WORLD_LOCAL_SIZE",
                             "PMI_RANK",
                             "PMI_SIZE",
                             "MPI_LOCALRANKID",
                             "MPI_LOCALNRANKS",
                             "SLURM_PROCID",
                             "SLURM_STEP_NUM_TASKS",
                             "SLURM_LOCALID",
                             "SLURM_NODEID",
                             "SLURM_STEP_TASKS_PER_NODE",
                             "MASTER_ADDR",
                             "MASTER_PORT",
                             "TORCHELASTIC_USE_AGENT_STORE",
                             "TORCHELASTIC_RESTART_COUNT",
                             "GLOO_SOCKET_IFNAME",
                             "FSDP_LOG_LEVEL",
                             "FSDP_FAKE_ALL_GATHER",
                             "FSDP_FAKE_REDUCE",
                             "FSDP_USE_FULL_PREC_IN_EVAL",
                             "FSDP_SANITIZE",
                             "FSDP_SANITIZE_SEED",
                             "FSDP_SCHEDULE_CHECK",
                             "FSDP_COPY_ON_CPU",
                             "TORCH_DISTRIBUTED_DEBUG"})
      set(name, std::nullopt);
    for (const auto& [name, value] : variables) set(name, value);
  }
  ~ScopedEnvironment() {
    for (const auto& [name, value] : before_) put(name, value);
  }
  ScopedEnvironment(const ScopedEnvironment&) = delete;
  ScopedEnvironment& operator=(const ScopedEnvironment&) = delete;

 private:
  static void put(const std::string& name, const std::optional<std::string>& value) {
    if (value)
      ::setenv(name.c_str(), value->c_str(), /*overwrite=*/1);
    else
      ::unsetenv(name.c_str());
  }
  void set(const std::string& name, const std::optional<std::string>& value) {
    const char* old = std::getenv(name.c_str());
    // The first value seen is the one to return to.
    before_.try_emplace(name, old ? std::optional<std::string>(old) : std::nullopt);
    put(name, value);
  }

  std::map<std::string, std::optional<std::string>> before_;
};

}  // namespace fsdp::test
