#pragma once

#include <algorithm>
#include <cstdint>

#include "fsdp/statistics.hpp"

namespace fsdp {

/// How much a root's steps communicate, and how many bytes of unsharded parameters live at a time.
class StepMeter {
 public:
  /// Since the root was made. Whoever communicates adds to it.
  StepStatistics& total() { return total_; }
  /// Of the last step that came to its end.
  const StepStatistics& last_step() const { return last_step_; }

  void add_unsharded(int64_t bytes) {
    unsharded_bytes_ += bytes;
    peak_unsharded_bytes_ = std::max(peak_unsharded_bytes_, unsharded_bytes_);
    step_peak_bytes_ = std::max(step_peak_bytes_, unsharded_bytes_);
  }
  void remove_unsharded(int64_t bytes) { unsharded_bytes_ -= bytes; }
  int64_t unsharded_bytes() const { return unsharded_bytes_; }
  int64_t peak_unsharded_bytes() const { return peak_unsharded_bytes_; }
  int64_t last_step_peak_bytes() const { return last_step_peak_bytes_; }

  void begin_step();
  void end_step();

 private:
  StepStatistics total_, before_step_, last_step_;
  int64_t unsharded_bytes_ = 0, peak_unsharded_bytes_ = 0;
  int64_t step_peak_bytes_ = 0, last_step_peak_bytes_ = 0;
};

}  // namespace fsdp
