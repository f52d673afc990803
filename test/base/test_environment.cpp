#include <catch2/catch.hpp>

#include "base/environment.hpp"
#include "fsdp/error.hpp"
#include "support/scoped_environment.hpp"

namespace fsdp::test {

using Catch::Contains;

TEST_CASE("without a launcher a process is a world of its own", "[base][environment]") {
  const ScopedEnvironment environment(Variables{});
  const LaunchEnvironment launch = launch_environment();
  CHECK(launch.launcher == "none");
  CHECK(launch.rank == 0);
  CHECK(launch.world_size == 1);
  CHECK(launch.local_world_size == 1);
}

TEST_CASE("torchrun's variables are read", "[base][environment]") {
  const ScopedEnvironment environment(Variables{
      {"RANK", "5"}, {"WORLD_SIZE", "8"}, {"LOCAL_RANK", "1"}, {"LOCAL_WORLD_SIZE", "4"}});
  const LaunchEnvironment launch = launch_environment();
  CHECK(launch.launcher == "torchrun");
  CHECK(launch.rank == 5);
  CHECK(launch.world_size == 8);
  CHECK(launch.local_rank == 1);
  CHECK(launch.local_world_size == 4);
}

TEST_CASE("RANK and WORLD_SIZE set by hand mean that all ranks share one node",
          "[base][environment]") {
  const ScopedEnvironment environment(Variables{{"RANK", "1"}, {"WORLD_SIZE", "2"}});
  const LaunchEnvironment launch = launch_environment();
  CHECK(launch.local_rank == 1);
  CHECK(launch.local_world_size == 2);
}

TEST_CASE("Open MPI's variables are read", "[base][environment]") {
  const ScopedEnvironment environment(Variables{{"OMPI_COMM_WORLD_RANK", "3"},
                                                {"OMPI_COMM_WORLD_SIZE", "4"},
                                                {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                                                {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}});
  const LaunchEnvironment launch = launch_environment();
  CHECK(launch.launcher == "mpirun");
  CHECK(launch.rank == 3);
  CHECK(launch.world_size == 4);
  CHECK(launch.local_rank == 1);
  CHECK(launch.local_world_size == 2);
}

TEST_CASE("MPICH's variables are read", "[base][environment]") {
  const ScopedEnvironment environment(Variables{
      {"PMI_RANK", "2"}, {"PMI_SIZE", "4"}, {"MPI_LOCALRANKID", "0"}, {"MPI_LOCALNRANKS", "2"}});
  const LaunchEnvironment launch = launch_environment();
  CHECK(launch.launcher == "mpirun");
  CHECK(launch.rank == 2);
  CHECK(launch.local_rank == 0);
  CHECK(launch.local_world_size == 2);
}

TEST_CASE("srun's variables are read, with the tasks of this node", "[base][environment]") {
  // Nodes 0 and 1 run four tasks each, node 2 runs three.
  const ScopedEnvironment environment(Variables{{"SLURM_PROCID", "9"},
                                                {"SLURM_STEP_NUM_TASKS", "11"},
                                                {"SLURM_LOCALID", "1"},
                                                {"SLURM_NODEID", "2"},
                                                {"SLURM_STEP_TASKS_PER_NODE", "4(x2),3"}});
  const LaunchEnvironment launch = launch_environment();
  CHECK(launch.launcher == "srun");
  CHECK(launch.rank == 9);
  CHECK(launch.world_size == 11);
  CHECK(launch.local_rank == 1);
  CHECK(launch.local_world_size == 3);
}

TEST_CASE("a process of a Slurm batch script, outside srun, is no rank", "[base][environment]") {
  const ScopedEnvironment environment(Variables{{"SLURM_PROCID", "0"}});
  CHECK(launch_environment().launcher == "none");
}

TEST_CASE("torchrun under mpirun counts as torchrun", "[base][environment]") {
  const ScopedEnvironment environment(Variables{{"RANK", "1"},
                                                {"WORLD_SIZE", "2"},
                                                {"OMPI_COMM_WORLD_RANK", "0"},
                                                {"OMPI_COMM_WORLD_SIZE", "1"}});
  CHECK(launch_environment().launcher == "torchrun");
  CHECK(launch_environment().world_size == 2);
}

TEST_CASE("a malformed launcher variable is named with what it holds", "[base][environment]") {
  const auto message = [](const Variables& variables) {
    const ScopedEnvironment environment(variables);
    try {
      launch_environment();
    } catch (const UsageError& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  CHECK_THAT(message({{"RANK", "two"}, {"WORLD_SIZE", "4"}}),
             Contains("RANK: expected an integer") && Contains("found 'two'"));
  CHECK_THAT(message({{"RANK", "1"}, {"WORLD_SIZE", "4x"}}), Contains("WORLD_SIZE"));
  CHECK_THAT(message({{"RANK", "0"}, {"WORLD_SIZE", "0"}}), Contains("WORLD_SIZE"));
  CHECK_THAT(message({{"RANK", "4"}, {"WORLD_SIZE", "4"}}),
             Contains("RANK: expected a rank below WORLD_SIZE = 4, found 4"));
  CHECK_THAT(message({{"RANK", "-1"}, {"WORLD_SIZE", "4"}}), Contains("RANK"));
  CHECK_THAT(message({{"RANK", "1"}}), Contains("RANK is set but WORLD_SIZE is not"));
  CHECK_THAT(message({{"WORLD_SIZE", "2"}}), Contains("WORLD_SIZE is set but RANK is not"));
  CHECK_THAT(
      message({{"RANK", "1"}, {"WORLD_SIZE", "4"}, {"LOCAL_RANK", "2"}, {"LOCAL_WORLD_SIZE", "2"}}),
      Contains("LOCAL_RANK: expected a local rank below the node's 2 ranks, found 2"));
  for (const std::string tasks : {"4(x2", "x", "4,", "0", "4(x0)"})
    CHECK_THAT(message({{"SLURM_PROCID", "0"},
                        {"SLURM_STEP_NUM_TASKS", "8"},
                        {"SLURM_NODEID", "3"},
                        {"SLURM_STEP_TASKS_PER_NODE", tasks}}),
               Contains("SLURM_STEP_TASKS_PER_NODE: expected counts"));
}

TEST_CASE("the switches that leave collectives out are off unless they are set",
          "[base][environment]") {
  {
    const ScopedEnvironment environment(Variables{});
    CHECK_FALSE(environment::fakes_all_gather());
    CHECK_FALSE(environment::fakes_reduce());
  }
  {
    const ScopedEnvironment environment(
        Variables{{"FSDP_FAKE_ALL_GATHER", "1"}, {"FSDP_FAKE_REDUCE", "Off"}});
    CHECK(environment::fakes_all_gather());
    CHECK_FALSE(environment::fakes_reduce());
  }
  const ScopedEnvironment environment(Variables{{"FSDP_FAKE_REDUCE", "maybe"}});
  CHECK_THROWS_WITH(environment::fakes_reduce(),
                    "FSDP_FAKE_REDUCE: expected 0 or 1, found 'maybe'");
}

TEST_CASE("the meeting place is read, and a port out of range is refused", "[base][environment]") {
  {
    const ScopedEnvironment environment(Variables{{"MASTER_ADDR", "node7"},
                                                  {"MASTER_PORT", "29500"},
                                                  {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                                                  {"TORCHELASTIC_RESTART_COUNT", "2"}});
    const auto found = environment::rendezvous();
    CHECK(found.master_addr == "node7");
    CHECK(found.master_port == 29500);
    CHECK(found.agent_hosts_store);
    CHECK(found.restart_count == 2);
  }
  const ScopedEnvironment environment(Variables{{"MASTER_PORT", "70000"}});
  CHECK_THROWS_WITH(environment::rendezvous(), Contains("MASTER_PORT") && Contains("'70000'"));
}

}  // namespace fsdp::test
