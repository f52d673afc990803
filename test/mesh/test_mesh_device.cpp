#include <catch2/catch.hpp>

#include "fsdp/error.hpp"
#include "support/logged_lines.hpp"
#include "mesh/mesh_device.hpp"
#include "support/split_log.hpp"
#include "support/error_of.hpp"

namespace fsdp::test {

TEST_CASE("on the CPU a rank's device has no index", "[mesh][mesh_device]") {
  CHECK(device_of_rank(c10::kCPU) == c10::Device(c10::kCPU));
  CHECK(init_device_mesh(SplitLog::world(1, 2), {2}).device() == c10::Device(c10::kCPU));
}

TEST_CASE("an accelerator's index is the launcher's local rank", "[mesh][mesh_device]") {
  const LaunchEnvironment launch{.rank = 6, .world_size = 8, .local_rank = 2, .local_world_size = 4,
                                 .launcher = "torchrun"};
  CHECK(device_index(c10::kCUDA, launch, {.count = 4, .current = 0}) == 2);
}

TEST_CASE("without a launcher the current device is taken, with a warning", "[mesh][mesh_device]") {
  const LoggedLines logged;
  CHECK(device_index(c10::kCUDA, LaunchEnvironment{}, {.count = 4, .current = 3}) == 3);
  CHECK(logged.count("no launcher set LOCAL_RANK; taking the current one, cuda:3") == 1);
}

TEST_CASE("where each rank sees its own device only, that is taken, with a warning", "[mesh][mesh_device]") {
  const LoggedLines logged;
  const LaunchEnvironment launch{.rank = 2, .world_size = 4, .local_rank = 2, .local_world_size = 4,
                                 .launcher = "srun"};
  CHECK(device_index(c10::kCUDA, launch, {.count = 1, .current = 0}) == 0);
  CHECK(logged.count("local rank 2 but 1 visible cuda device(s); taking the current one, cuda:0") == 1);
}

TEST_CASE("a device type without a device is refused before any group is made", "[mesh][mesh_device]") {
  using Catch::Contains;
  // An accelerator that no torch wheel on PyPI is built for.
  const auto world = SplitLog::world(0, 4);
  CHECK_THAT(error_of<UsageError>([&] {
               init_device_mesh(world, {2, 2}, {"a", "b"}, {.device_type = c10::DeviceType::HPU});
             }),
             Contains("device type hpu") && Contains("found none") && Contains("use cpu"));
  CHECK(world->splits().empty());
}

}  // namespace fsdp::test
