#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "fsdp/statistics.hpp"
#include "trace/timeline_recorder.hpp"

namespace fsdp {

/// Counts how much a root's steps communicate, and how many bytes of unsharded parameters live at a time.
class StepMeter {
 public:
  /// Returns the counts since the root was made. Whoever communicates adds to them.
  StepStatistics& total() { return total_; }
  /// Returns the counts of the last step that came to its end.
  const StepStatistics& last_step() const { return last_step_; }

  void add_unsharded(int64_t bytes) {
    unsharded_bytes_ += bytes;
    peak_unsharded_bytes_ = std::max(peak_unsharded_bytes_, unsharded_bytes_);
    step_peak_bytes_ = std::max(step_peak_bytes_, unsharded_bytes_);
    show();
  }
  void remove_unsharded(int64_t bytes) {
    unsharded_bytes_ -= bytes;
    show();
  }
  /// Adds bytes of packed gradients that a reduction holds; less than 0: it does not hold them any more.
  void add_packed(int64_t bytes) {
    packed_bytes_ += bytes;
    show();
  }
  /// Adds a wait of the host for a collective: where those run on a stream, as long as it takes to let another stream wait.
  void add_wait(int64_t ns) { step_wait_ns_ += ns; }
  /// Returns how long the host has waited in the step that has begun last.
  int64_t step_wait_ns() const { return step_wait_ns_; }
  /// Sets who writes down what is held; null: nobody.
  void set_recorder(TimelineRecorder* recorder) {
    recorder_ = recorder;
    show();
  }
  int64_t unsharded_bytes() const { return unsharded_bytes_; }
  int64_t peak_unsharded_bytes() const { return peak_unsharded_bytes_; }
  int64_t last_step_peak_bytes() const { return last_step_peak_bytes_; }

  void begin_step();
  void end_step();

 private:
  void show() {
    if (recorder_ != nullptr) [[unlikely]]
      recorder_->count_bytes(unsharded_bytes_, packed_bytes_);
  }

  StepStatistics total_, before_step_, last_step_;
  int64_t unsharded_bytes_ = 0, peak_unsharded_bytes_ = 0;
  int64_t step_peak_bytes_ = 0, last_step_peak_bytes_ = 0;
  int64_t packed_bytes_ = 0, step_wait_ns_ = 0;
  TimelineRecorder* recorder_ = nullptr;
};

/// Counts the packed gradients of one reduction, as long as it holds them.
class PackedBytes {
 public:
  PackedBytes() = default;
  PackedBytes(StepMeter& meter, int64_t bytes) : meter_(&meter), bytes_(bytes) { meter.add_packed(bytes); }
  PackedBytes(PackedBytes&& other) noexcept : meter_(std::exchange(other.meter_, nullptr)), bytes_(other.bytes_) {}
  PackedBytes& operator=(PackedBytes&& other) noexcept {
    release();
    meter_ = std::exchange(other.meter_, nullptr);
    bytes_ = other.bytes_;
    return *this;
  }
  ~PackedBytes() { release(); }
  void release() {
    if (auto* meter = std::exchange(meter_, nullptr)) meter->add_packed(-bytes_);
  }

 private:
  StepMeter* meter_ = nullptr;
  int64_t bytes_ = 0;
};

}  // namespace fsdp
