#pragma once

#include <cstdlib>
#include <random>
#include <string>
#include <vector>

namespace fsdp::test {

/// FSDP_TEST_SEED if it is set, to repeat a failure, else a new seed for every run.
inline uint64_t draw_seed() {
  const char* given = std::getenv("FSDP_TEST_SEED");
  return given ? std::stoull(given) : std::random_device{}();
}

/// Small random numbers, the same on every rank that was given the same seed.
class Draw {
 public:
  explicit Draw(uint64_t seed) : engine_(seed) {}

  int64_t between(int64_t least, int64_t most) {
    return std::uniform_int_distribution<int64_t>(least, most)(engine_);
  }
  template <class T>
  const T& one_of(const std::vector<T>& choices) {
    return choices[between(0, static_cast<int64_t>(choices.size()) - 1)];
  }
  std::vector<int64_t> sizes(int64_t least_dims, int64_t most_dims, int64_t most_size) {
    std::vector<int64_t> sizes(between(least_dims, most_dims));
    for (int64_t& size : sizes) size = between(0, most_size);
    return sizes;
  }

 private:
  std::mt19937_64 engine_;
};

}  // namespace fsdp::test
