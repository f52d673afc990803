#include <catch2/catch.hpp>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <thread>

#include "saved_parts.hpp"
#include "support/ranks.hpp"
#include "support/skip.hpp"
#include "temporary_folder.hpp"
#include "support/draw.hpp"

// A program that saves, killed at random moments. FSDP_KILLS says how many.

extern char** environ;

namespace fsdp::test {
namespace {

int kills() {
  const char* count = std::getenv("FSDP_KILLS");
  return count == nullptr ? 4 : std::atoi(count);
}

/// How a new checkpoint takes the old one's place: by one exchange, or where that is refused by two renames.
enum class Replaces { kByExchange, kByTwoRenames };

/// The program of saver.cpp, with what it prints.
class Saver {
 public:
  Saver(const std::string& program, const std::string& folder, int first, Replaces how) {
    int ends[2];
    REQUIRE(::pipe(ends) == 0);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
    posix_spawn_file_actions_addclose(&actions, ends[0]);
    const auto number = std::to_string(first);
    const char* arguments[] = {program.c_str(), folder.c_str(), number.c_str(), "1000000",
                               how == Replaces::kByTwoRenames ? "two-renames" : nullptr, nullptr};
    REQUIRE(::posix_spawn(&process_, program.c_str(), &actions, nullptr, const_cast<char**>(arguments), environ) == 0);
    posix_spawn_file_actions_destroy(&actions);
    ::close(ends[1]);
    output_ = ends[0];
  }
  ~Saver() {
    ::kill(process_, SIGKILL);
    ::waitpid(process_, nullptr, 0);
    ::close(output_);
  }
  Saver(const Saver&) = delete;
  Saver& operator=(const Saver&) = delete;

  /// Waits until as many saves have begun.
  void wait_for(int saves) const {
    for (char next = 0; saves > 0 && ::read(output_, &next, 1) == 1;)
      if (next == '\n') --saves;
  }

 private:
  pid_t process_ = -1;
  int output_ = -1;
};

/// The number of the save that the checkpoint is from; it is one save's everywhere.
int check_whole(const std::string& path) {
  const NamedTensors tensors{{"first.weight", torch::zeros({700, 300})}, {"first.bias", torch::zeros({700})},
                             {"second.weight", torch::zeros({301, 700})}, {"second.bias", torch::zeros({301})},
                             {"table", torch::zeros({7}, at::kLong)}};
  CheckpointReader reader(path);
  reader.load({whole_section(tensors)});
  const int save = std::stoi(reader.document("extra.json").value());
  for (const auto& [name, value] : tensors)
    CHECK(value.equal(name == "table" ? torch::arange(7) : torch::full_like(value, save)));
  return save;
}

TEST_CASE("a save that is killed at any moment leaves a whole checkpoint", "[checkpoint][kills]") {
  const char* program = std::getenv("FSDP_CHECKPOINT_SAVER");
  if (program == nullptr) {
    skip("FSDP_CHECKPOINT_SAVER does not name the program");
    return;
  }
  const uint64_t seed = draw_seed();
  INFO("FSDP_TEST_SEED=" << seed);
  Draw draw(seed);
  TemporaryFolder folder;
  int last = 0;
  for (int i = 0; i < kills(); ++i) {
    {
      Saver saver(program, folder.path(), last + 1, i % 2 == 0 ? Replaces::kByTwoRenames : Replaces::kByExchange);
      // One is whole, then another has begun.
      saver.wait_for(2);
      std::this_thread::sleep_for(std::chrono::microseconds(draw.between(0, 99'999)));
    }
    const int found = check_whole(folder / "c");
    CHECK(found > last);
    last = found;
  }
  // What the last one left goes with the next save.
  { Saver saver(program, folder.path(), last + 1, Replaces::kByExchange); saver.wait_for(2); }
  save_checkpoint_parts(folder / "c", {{whole_section({{"w", torch::ones({2})}})}});
  CHECK(folder.names() == std::set<std::string>{"c"});
}

}  // namespace
}  // namespace fsdp::test
