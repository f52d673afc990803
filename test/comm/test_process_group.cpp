#include "fsdp/process_group.hpp"

#include <sys/wait.h>
#include <unistd.h>
#include <catch2/catch.hpp>
#include <csignal>
#include <filesystem>

#include "comm/default_backend.hpp"
#include "comm/nccl/nccl_backend.hpp"
#include "fsdp/error.hpp"
#include "rank_results.hpp"
#include "support/scoped_environment.hpp"
#include "support/skip.hpp"

namespace fsdp::test {
namespace {

using Catch::Contains;

/// Leaves no default world behind.
struct WorldGuard {
  ~WorldGuard() { destroy_process_group(); }
};

/// Starts this program again for the one hidden test `name`, with `variables` in its environment.
pid_t start_self(const std::string& name, const Variables& variables) {
  const pid_t child = ::fork();
  if (child != 0) return child;
  for (const auto& [variable, value] : variables)
    ::setenv(variable.c_str(), value.c_str(), /*overwrite=*/1);
  ::execl("/proc/self/exe", "fsdp_test_comm", name.c_str(), static_cast<char*>(nullptr));
  ::_exit(127);
}

int exit_status(pid_t child) {
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

/// One that other runs of this program on this machine are unlikely to use.
int unused_port() { return 20000 + ::getpid() % 20000; }

std::string init_error(const ProcessGroupOptions& options) {
  try {
    init_process_group(options);
  } catch (const UsageError& error) {
    return error.what();
  }
  destroy_process_group();
  return "";
}

}  // namespace

TEST_CASE("the rank of a process that another test started", "[.][rank_process]") {
  const auto world = init_process_group({.timeout = beyond_patience()});
  const at::Tensor sum = at::full({1}, world->rank() + 1.0F);
  all_reduce(*world, sum);
  CHECK(sum.item<float>() == 3);
  const auto pair = world->split(std::vector<int>{1, 0}, "pair");
  const at::Tensor gathered = at::zeros({2});
  all_gather(*pair, gathered, at::full({1}, world->rank() + 1.0F));
  CHECK(at::equal(gathered, at::tensor({2, 1}, at::kFloat)));
  destroy_process_group();
}

TEST_CASE("the rank of a process that kills itself", "[.][rank_killed]") {
  REQUIRE(std::getenv("FSDP_TEST_FILE") != nullptr);  // not to be run by hand
  const auto world =
      init_process_group({.init_method = "file://" + std::string(std::getenv("FSDP_TEST_FILE")),
                          .timeout = beyond_patience()});
  all_reduce(*world, at::ones({1}));
  ::raise(SIGKILL);
}

TEST_CASE("two processes meet through MASTER_ADDR and MASTER_PORT", "[comm][process_group]") {
  const std::string port = std::to_string(unused_port());
  std::vector<pid_t> children;
  for (const std::string rank : {"0", "1"})
    children.push_back(
        start_self("the rank of a process that another test started", {{"RANK", rank},
                                                                       {"WORLD_SIZE", "2"},
                                                                       {"MASTER_ADDR", "127.0.0.1"},
                                                                       {"MASTER_PORT", port}}));
  for (const pid_t child : children) CHECK(exit_status(child) == 0);
}

TEST_CASE("a process that is killed ends the others in an error", "[comm][process_group]") {
  const WorldGuard guard;
  const std::string path = unused_path();
  const pid_t child = start_self("the rank of a process that kills itself",
                                 {{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"FSDP_TEST_FILE", path}});
  const auto world = init_process_group({.backend = "gloo",
                                         .init_method = "file://" + path,
                                         .rank = 0,
                                         .world_size = 2,
                                         .timeout = beyond_patience()});
  all_reduce(*world, at::ones({1}));
  CHECK(exit_status(child) == -SIGKILL);
  const auto begin = std::chrono::steady_clock::now();
  CHECK_THROWS_WITH(
      reduce_scatter(*world, at::zeros({4}), at::ones({8}), ReduceOp::kSum, "blocks.3"),
      Contains("reduce_scatter of 'blocks.3' (32 bytes) in group 'world' on rank 0"));
  CHECK(std::chrono::steady_clock::now() - begin < patience());
  std::filesystem::remove(path);
}

TEST_CASE("a write to a rank that is gone is an error and not the end of the process, unless the program handles it",
          "[comm][process_group]") {
  const WorldGuard guard;
  struct sigaction before {};
  REQUIRE(sigaction(SIGPIPE, nullptr, &before) == 0);
  using Handler = void (*)(int);
  const Handler own = [](int) {};
  for (const auto& [given, expected] : {std::pair<Handler, Handler>{SIG_DFL, SIG_IGN}, {own, own}, {SIG_IGN, SIG_IGN}}) {
    signal(SIGPIPE, given);
    const std::string path = unused_path();
    init_process_group({.backend = "gloo", .init_method = "file://" + path, .rank = 0, .world_size = 1});
    struct sigaction now {};
    CHECK(sigaction(SIGPIPE, nullptr, &now) == 0);
    CHECK(now.sa_handler == expected);
    destroy_process_group();
    std::filesystem::remove(path);
  }
  sigaction(SIGPIPE, &before, nullptr);
}

TEST_CASE("without a launcher the default world is one rank", "[comm][process_group]") {
  const ScopedEnvironment environment(Variables{});
  const WorldGuard guard;
  CHECK_FALSE(is_initialized());
  const auto world = default_process_group();
  CHECK(is_initialized());
  CHECK(world->backend() == "single");
  CHECK(world->size() == 1);
  CHECK(default_process_group() == world);
  CHECK_THROWS_AS(init_process_group(), StateError);
  destroy_process_group();
  CHECK_FALSE(is_initialized());
  CHECK(init_process_group() != world);
}

TEST_CASE("a file is a meeting place, and a world can be made again", "[comm][process_group]") {
  const ScopedEnvironment environment(Variables{});
  const WorldGuard guard;
  for (int i = 0; i < 2; ++i) {
    const std::string path = unused_path();
    const auto world = init_process_group(
        {.backend = "gloo", .init_method = "file://" + path, .rank = 0, .world_size = 1});
    CHECK(world->backend() == "gloo");
    const at::Tensor gathered = at::zeros({2});
    all_gather(*world, gathered, at::ones({2}));
    CHECK(at::equal(gathered, at::ones({2})));
    destroy_process_group();
    std::filesystem::remove(path);
  }
}

TEST_CASE("ranks that do not come are named", "[comm][process_group]") {
  const ScopedEnvironment environment(Variables{});
  const WorldGuard guard;
  const std::string path = unused_path();
  CHECK_THROWS_WITH(init_process_group({.backend = "gloo",
                                        .init_method = "file://" + path,
                                        .rank = 1,
                                        .world_size = 3,
                                        .timeout = std::chrono::milliseconds(300)}),
                    Contains("on rank 1 of 3: no sign of rank(s) 0, 2 at file://" + path));
  CHECK_FALSE(is_initialized());
  std::filesystem::remove(path);
}

TEST_CASE("without a GPU, NCCL is refused with the way out, through c10d too", "[comm][process_group]") {
  if (has_nccl(/*devices=*/1)) return skip("a GPU");
  const ScopedEnvironment environment(Variables{});
  const auto options = [](const std::string& backend) {
    return ProcessGroupOptions{
        .backend = backend, .init_method = "file://" + unused_path(), .rank = 0, .world_size = 1};
  };
  CHECK_THAT(init_error(options("nccl")), Contains("backend nccl") && Contains("use backend gloo"));
  CHECK_THROWS_WITH(init_process_group(options("c10d_nccl")), Contains("GPU") || Contains("use backend gloo"));
  CHECK_FALSE(is_initialized());
}

TEST_CASE("over GPUs a program that names no backend gets c10d's NCCL", "[comm][process_group]") {
  CHECK(std::string(default_backend(/*world_size=*/2, /*has_gpus=*/true)) == "c10d_nccl");
  CHECK(std::string(default_backend(2, false)) == "gloo");
  CHECK(std::string(default_backend(1, true)) == "single");
}

TEST_CASE("options that contradict each other are rejected", "[comm][process_group]") {
  const ScopedEnvironment environment(Variables{});
  CHECK_THAT(init_error({.rank = 1}), Contains("rank was given without world_size"));
  CHECK_THAT(init_error({.world_size = 2}), Contains("world_size was given without rank"));
  CHECK_THAT(init_error({.rank = 2, .world_size = 2}), Contains("found rank 2 of 2"));
  CHECK_THAT(init_error({.backend = "carrier pigeon"}),
             Contains("gloo, nccl, c10d_nccl or single") && Contains("found 'carrier pigeon'"));
  CHECK_THAT(init_error({.backend = "single", .rank = 0, .world_size = 2}), Contains("one rank"));
  CHECK_THAT(init_error({.backend = "gloo", .rank = 0, .world_size = 2, .use_copy_engine_all_gather = true}),
             Contains("use_copy_engine_all_gather needs backend nccl, found gloo"));
  CHECK_THAT(init_error({.backend = "gloo", .init_method = "smb://x", .rank = 0, .world_size = 2}),
             Contains("expected init_method") && Contains("'smb://x'"));
  CHECK_THAT(
      init_error({.backend = "gloo", .init_method = "tcp://host", .rank = 0, .world_size = 2}),
      Contains("tcp://host:port"));
  CHECK_THAT(init_error({.backend = "gloo", .rank = 0, .world_size = 2}),
             Contains("MASTER_ADDR and MASTER_PORT, found neither"));
}

}  // namespace fsdp::test
