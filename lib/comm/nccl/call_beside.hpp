// Only in builds with CUDA.
#pragma once

#include <c10/core/Device.h>

#include <functional>
#include <memory>
#include <string>

namespace fsdp {

/// Asked again and again while the host waits for NCCL; throws CommError with the reason to wait no longer.
using Patience = std::function<void()>;

/// What a call on a thread of its own and whoever waits for it agree on: either the call comes to its last step, or it has
/// been given up and does not take it. Thread-safe.
class LastStep {
 public:
  virtual ~LastStep() = default;
  /// Asked by the call in front of its last step. False: it has been given up.
  virtual bool may_begin() = 0;
  /// Asked by whoever waits no longer. False: the last step has begun already, and will end.
  virtual bool give_up() = 0;
};
std::shared_ptr<LastStep> make_last_step();

/// Runs `call` on a thread of its own, with that device as the thread's, and waits for it: NCCL's calls that wait for other
/// ranks have no end of their own. It returns why it failed; empty: it has not.
///
/// Throws what `patience` does, while the thread goes on: `call` owns all that it uses. Throws CommError with what it returned.
void call_beside(c10::Device device, std::function<std::string()> call, const Patience& patience);

}  // namespace fsdp
