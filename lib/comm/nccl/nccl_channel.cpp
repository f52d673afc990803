#include "comm/nccl/nccl_channel.hpp"

#include <algorithm>
#include <iterator>
#include <thread>
#include <utility>

namespace fsdp {

using Clock = std::chrono::steady_clock;

void NcclChannel::begin(const std::shared_ptr<NcclFlight>& flight, std::vector<at::Tensor> tensors) {
  std::lock_guard lock(mutex_);
  flight->tensors = std::move(tensors);
  if (!flight->is_captured) flights_.push_back(flight);
}

void NcclChannel::note_launched(NcclFlight& flight, std::shared_ptr<StreamEvent> done) {
  std::lock_guard lock(mutex_);
  flight.done = std::move(done);
}

void NcclChannel::let_go(NcclFlight& flight) {
  std::vector<at::Tensor> unused;  // goes without the lock
  std::lock_guard lock(mutex_);
  unused.swap(flight.tensors);
}

void NcclChannel::settle(std::vector<at::Tensor>& unused) {
  std::lock_guard lock(mutex_);
  settle_locked(unused);
}

void NcclChannel::settle_locked(std::vector<at::Tensor>& unused) {
  while (!flights_.empty() && flights_.front()->done && flights_.front()->done->is_done()) {
    // Those of a Work that is still there go with its wait, or with it: on the thread that will use the memory again, and
    // not at any time while this one still has them in its hands.
    if (flights_.front().use_count() == 1) {
      auto& tensors = flights_.front()->tensors;
      std::move(tensors.begin(), tensors.end(), std::back_inserter(unused));
      tensors.clear();
    }
    flights_.pop_front();
  }
}

std::shared_ptr<NcclFlight> NcclChannel::oldest() const {
  std::lock_guard lock(mutex_);
  return flights_.empty() ? nullptr : flights_.front();
}

bool NcclChannel::is_quiet() const {
  std::unique_lock lock(mutex_);
  const auto last = flights_.empty() ? nullptr : flights_.back();
  const auto done = last ? last->done : nullptr;
  lock.unlock();
  return !last || (done && done->is_done());
}

size_t NcclChannel::finish(Clock::time_point end) {
  std::vector<at::Tensor> unused;
  Flights left;  // both go without the lock
  for (bool goes_on = true; goes_on;) {
    std::unique_lock lock(mutex_);
    try {
      settle_locked(unused);
    } catch (const std::exception&) {
      break;  // a device that fails runs nothing
    }
    goes_on = !flights_.empty() && flights_.front()->done && Clock::now() <= end;
    lock.unlock();
    if (goes_on) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  {
    std::lock_guard lock(mutex_);
    left.swap(flights_);
  }
  if (left.empty() || Clock::now() <= end) return 0;
  return (new Flights(std::move(left)))->size();
}

}  // namespace fsdp
