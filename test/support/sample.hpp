#pragma once

#include <cstdlib>
#include <string_view>

namespace fsdp::test {

/// Which of many combinations a usual run takes: one in `one_in`, spread evenly over all of them, and the same ones every
/// time. Over a library with sanitizers (FSDP_TEST_SANITIZED, of tools/run_tests.py) a third of these: what sanitizers look for
/// hardly depends on a combination, and each takes three times as long. With FSDP_TEST_THOROUGH (tools/test --thorough) all.
class Sample {
 public:
  explicit Sample(int one_in)
      : one_in_(is_thorough() ? 1 : is_set("FSDP_TEST_SANITIZED") ? 3 * one_in : one_in) {}

  bool takes_all() const { return one_in_ == 1; }

  /// Asked once for each combination, in their order.
  bool takes_next() {
    // The golden ratio's multiples never fall in step with the loops that the combinations come from.
    constexpr double kGoldenRatio = 0.6180339887498949;
    const double place = kGoldenRatio * count_++;
    return (place - static_cast<double>(static_cast<long>(place))) * one_in_ < 1;
  }

  /// Of `count` random draws those of a usual run, which draws others than the run before.
  static int draws(int count) {
    const int one_in = Sample(3).one_in_;
    return (count + one_in - 1) / one_in;
  }

  static bool is_thorough() { return is_set("FSDP_TEST_THOROUGH"); }

 private:
  static bool is_set(const char* variable) {
    const char* value = std::getenv(variable);
    return value != nullptr && std::string_view(value) == "1";
  }

  int one_in_;
  int count_ = 0;
};

}  // namespace fsdp::test
