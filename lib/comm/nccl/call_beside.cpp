#include "comm/nccl/call_beside.hpp"

#include <c10/core/DeviceGuard.h>

#include <chrono>
#include <future>
#include <mutex>
#include <thread>
#include <utility>

#include "base/first_line.hpp"
#include "fsdp/error.hpp"

namespace fsdp {
namespace {

constexpr auto kCallPoll = std::chrono::milliseconds(1);

class OneWins final : public LastStep {
 public:
  bool may_begin() override { return decide(Decision::kBegun); }
  bool give_up() override { return decide(Decision::kGivenUp); }

 private:
  enum class Decision { kNone, kBegun, kGivenUp };

  bool decide(Decision wanted) {
    std::lock_guard lock(mutex_);
    if (decision_ == Decision::kNone) decision_ = wanted;
    return decision_ == wanted;
  }

  std::mutex mutex_;
  Decision decision_ = Decision::kNone;
};

}  // namespace

std::shared_ptr<LastStep> make_last_step() { return std::make_shared<OneWins>(); }

void call_beside(c10::Device device, std::function<std::string()> call, const Patience& patience) {
  std::promise<std::string> promised;
  auto ended = promised.get_future();
  std::thread([device, call = std::move(call), promised = std::move(promised)]() mutable {
    try {
      // A new thread's device is 0, of which NCCL would make a context.
      const c10::DeviceGuard on_device(device);
      promised.set_value(call());
    } catch (const std::exception& error) {
      promised.set_value(first_line(error.what()));
    }
  }).detach();
  while (ended.wait_for(kCallPoll) != std::future_status::ready) patience();
  if (const std::string reason = ended.get(); !reason.empty()) throw CommError(reason);
}

}  // namespace fsdp
