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

bool is_sanitized() { return from_environment("FSDP_SANITIZE", 0) != 0; }

/// One JSON object on a line of its own: the record of a run, or of a part of one.
void print_record(uint64_t first, uint64_t done, double seconds, const std::vector<uint64_t>& failed) {
  fmt::print("{{\"test\": \"random_trees\", \"first_seed\": {}, \"draws\": {}, \"failed_seeds\": [{}], "
             "\"seconds\": {:.1f}, \"sanitizer\": {}, \"torch\": \"{}\"}}\n",
             first, done, fmt::join(failed, ", "), seconds, is_sanitized(), TORCH_VERSION);
}

// FSDP_DRAWS: how many (400; 200 under FSDP_SANITIZE, which starts at another seed). FSDP_SEED: of the first;
// each following is one more. FSDP_DRAW_SECONDS: instead of a number, draw until so much time has passed.
// FSDP_DRAW_VERBOSE: print each draw before it runs.
TEST_CASE("random module trees train like the unsharded model", "[property][random_trees]") {
  setenv("FSDP_COPY_ON_CPU", "1", /*overwrite=*/1);  // offloaded shards are copied here, too
  uint64_t first = from_environment("FSDP_SEED", is_sanitized() ? 1'000'001 : 1);
  uint64_t seconds = from_environment("FSDP_DRAW_SECONDS", 0);
  uint64_t draws = from_environment("FSDP_DRAWS", seconds ? ~uint64_t{0} : is_sanitized() ? 200 : 400);
  bool verbose = from_environment("FSDP_DRAW_VERBOSE", 0);
  auto start = std::chrono::steady_clock::now();
  auto elapsed = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(); };

  uint64_t done = 0;
  std::vector<uint64_t> failed;
  for (; done < draws && failed.size() < 5 && (!seconds || elapsed() < seconds); ++done) {
    uint64_t seed = first + done;
    auto tree = draw_tree(seed);
    if (verbose) fmt::print("seed {}: {}\n", seed, describe(tree)), std::fflush(stdout);
    INFO(fmt::format("reproduce with {}FSDP_SEED={} FSDP_DRAWS=1\n{}", is_sanitized() ? "FSDP_SANITIZE=1 " : "",
                     seed, describe(tree)));
    if (!trains_like_plain([&] { return build(tree); }, tree.training)) failed.push_back(seed);
  }
  fmt::print("{} draws from seed {} in {:.1f} s, {} failed{}\n", done, first, elapsed(), failed.size(),
             failed.empty() ? std::string() : fmt::format(": seeds {}", failed));
  print_record(first, done, elapsed(), failed);
  CHECK(failed.empty());
}

}  // namespace
}  // namespace fsdp::test
