#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/fault_log.hpp"

namespace fsdp {

/// A parameter in a buffer.
struct NamedBytes {
  int64_t begin = 0, bytes = 0;
  std::string name;
};

/// Whose memory it is, for what is found wrong with it.
struct BufferOrigin {
  std::shared_ptr<FaultLog> faults;
  std::string name;  ///< "gathered parameters of 'blocks.3'"
  std::vector<NamedBytes> parts = {};
};

/// Memory that was released, all poison, kept for a while before anybody gets it again. A byte that is
/// no longer poison when it is looked at was written by somebody who had no right to it.
///
/// Thread-safe.
class Quarantine {
 public:
  /// The process's for one device, made for the first who ask and gone with the last; for at least `bytes`. To look at a
  /// device's memory the host waits for it, and so for the ranks that it waits for: no other device's rank is to.
  static std::shared_ptr<Quarantine> shared(int64_t bytes, c10::Device device = at::kCPU);

  ~Quarantine();
  /// Poisons `memory`. What has been here longest goes, as far as there is no room.
  void add(at::Tensor memory, BufferOrigin origin);
  /// Looks at all memory of those whose faults go to `faults`.
  void check(const FaultLog* faults);

 private:
  struct Held {
    at::Tensor memory;
    BufferOrigin origin;
  };
  static void examine(const Held& entry);

  std::mutex mutex_;
  std::deque<Held> entries_;  // oldest first
  int64_t held_bytes_ = 0, limit_bytes_ = 0;
};

/// What the buffers that a thread makes are to be, while the sanitizer mode is on.
struct BufferGuard {
  std::shared_ptr<FaultLog> faults;
  std::shared_ptr<Quarantine> quarantine;
};

/// While it lives, `make_buffer` on this thread gives poisoned buffers that go to the quarantine.
class GuardedBuffers {
 public:
  /// name: of a BufferOrigin.
  GuardedBuffers(const BufferGuard& guard, std::string name);
  ~GuardedBuffers();
  GuardedBuffers(const GuardedBuffers&) = delete;
  GuardedBuffers& operator=(const GuardedBuffers&) = delete;

  /// The innermost on this thread; null where nothing is guarded.
  static const GuardedBuffers* current();
  /// `memory`, 1-D and of nobody else, as a guarded buffer of the same dtype.
  at::Tensor protect(at::Tensor memory) const;

 private:
  const BufferGuard& guard_;
  std::string name_;
  const GuardedBuffers* outer_;
};

/// Tells what lies where in a guarded buffer; nothing for any other tensor.
void name_parts(const at::Tensor& buffer, std::vector<NamedBytes> parts);

}  // namespace fsdp
