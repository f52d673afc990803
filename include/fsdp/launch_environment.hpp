#pragma once

#include <string>

#include "fsdp/api.hpp"

namespace fsdp {

/// How this process was started, read from the launcher's variables (torchrun, mpirun, srun).
struct FSDP_API LaunchEnvironment {
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;
  int local_world_size = 1;
  std::string launcher = "none";  ///< "torchrun", "mpirun", "srun" or "none"
};

/// Throws UsageError naming the variable if one is not a number or out of range.
FSDP_API LaunchEnvironment launch_environment();

}  // namespace fsdp
