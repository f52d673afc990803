#include <catch2/catch.hpp>

#include <chrono>
#include <cstdlib>

#include "property/random_tree.hpp"

namespace fsdp::test {
namespace {

uint64_t from_environment(const char* name, uint64_t otherwise) {
  const char* value = std::getenv(name);
  return value && *value ? std::strtoull(value, nullptr, 10) : otherwise;
}

// FSDP_DRAWS: how many (400). FSDP_SEED: of the first; each following is one more. FSDP_DRAW_SECONDS:
// instead of a number, draw until so much time has passed. FSDP_DRAW_VERBOSE: print each draw before it runs.
TEST_CASE("random module trees train like the unsharded model", "[property][random_trees]") {
  uint64_t first = from_environment("FSDP_SEED", 1);
  uint64_t seconds = from_environment("FSDP_DRAW_SECONDS", 0);
  uint64_t draws = from_environment("FSDP_DRAWS", seconds ? ~uint64_t{0} : 400);
  bool verbose = from_environment("FSDP_DRAW_VERBOSE", 0);
  auto start = std::chrono::steady_clock::now();
  auto elapsed = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(); };

  uint64_t done = 0;
  std::vector<uint64_t> failed;
  for (; done < draws && failed.size() < 5 && (!seconds || elapsed() < seconds); ++done) {
    uint64_t seed = first + done;
    auto tree = draw_tree(seed);
    if (verbose) fmt::print("seed {}: {}\n", seed, describe(tree)), std::fflush(stdout);
    INFO(fmt::format("reproduce with FSDP_SEED={} FSDP_DRAWS=1\n{}", seed, describe(tree)));
    if (!trains_like_plain([&] { return build(tree); }, tree.training)) failed.push_back(seed);
  }
  fmt::print("{} draws from seed {} in {:.1f} s, {} failed{}\n", done, first, elapsed(), failed.size(),
             failed.empty() ? std::string() : fmt::format(": seeds {}", failed));
  CHECK(failed.empty());
}

}  // namespace
}  // namespace fsdp::test
