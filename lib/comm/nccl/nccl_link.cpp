#include "comm/nccl/nccl_link.hpp"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <array>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "base/log.hpp"
#include "fsdp/error.hpp"

namespace fsdp {
namespace {

/// What takes less is not slept over: NCCL hands a launch to a thread of its own, which takes tens of microseconds.
constexpr auto kWithoutSleep = std::chrono::milliseconds(5);
constexpr auto kPollInterval = std::chrono::microseconds(500);
/// How long an abort lets a call of NCCL's come back by itself.
constexpr auto kAbortGrace = std::chrono::seconds(1);

/// True for an error. "In progress", in nonblocking mode, is good news too.
bool is_bad(ncclResult_t result) { return result != ncclSuccess && result != ncclInProgress; }

/// Says why `result` is bad. Empty: it is not.
std::string why_bad(const NcclApi& api, ncclResult_t result, ncclComm_t comm) {
  return is_bad(result) ? api.describe(result, comm) : std::string();
}

/// Waits until nothing of the communicator is in progress. Empty: all of it went well.
std::string why_not_ready(const NcclApi& api, ncclComm_t comm) {
  for (;; std::this_thread::sleep_for(kPollInterval)) {
    ncclResult_t state = ncclSuccess;
    if (const auto asked = api.comm_get_async_error(comm, &state); is_bad(asked)) return api.describe(asked, comm);
    if (state != ncclInProgress) return why_bad(api, state, comm);
  }
}

}  // namespace

void NcclLink::check(ncclResult_t result) const {
  if (is_bad(result)) [[unlikely]]
    throw CommError(api_.describe(result, comm_));
}

void NcclLink::stop_if_aborted() const {
  if (is_aborted_.load(std::memory_order_acquire)) [[unlikely]]
    throw CommError("aborted");
}

void NcclLink::await_ready(const Patience& patience) const {
  const auto begin = std::chrono::steady_clock::now();
  for (;;) {
    stop_if_aborted();
    ncclResult_t state = ncclSuccess;
    check(api_.comm_get_async_error(comm_, &state));
    check(state);
    if (state != ncclInProgress) return;
    patience();
    if (std::chrono::steady_clock::now() - begin < kWithoutSleep)
      std::this_thread::yield();
    else
      std::this_thread::sleep_for(kPollInterval);
  }
}

void NcclLink::connect(const ncclUniqueId& id, int rank, int size, c10::Device device, const Patience& patience) {
  std::lock_guard lock(mutex_);
  stop_if_aborted();
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 1;
  config.CTAPolicy = cta_policy_;
  const auto made = std::make_shared<ncclComm_t>(nullptr);
  const auto last = make_last_step();
  const auto connect = [api = &api_, id, rank, size, config, made, last]() mutable {
    std::string reason = why_bad(*api, api->comm_init_rank_config(made.get(), size, id, rank, &config), *made);
    if (reason.empty()) reason = why_not_ready(*api, *made);
    const bool is_wanted = last->may_begin();
    // Without a reason it is connected; a communicator that is not goes by an abort alone.
    if (*made != nullptr && (!reason.empty() || !is_wanted)) {
      (void)api->comm_abort(*made);
      *made = nullptr;
    }
    return reason;
  };
  call_beside(device, connect, [&] {
    try {
      patience();
    } catch (const std::exception&) {
      if (last->give_up()) throw;
    }
  });
  comm_ = *made;
  is_connected_.store(true, std::memory_order_release);
}

void NcclLink::launch(const std::function<ncclResult_t(ncclComm_t)>& enqueue, const Patience& patience) {
  std::lock_guard lock(mutex_);
  stop_if_aborted();
  check(api_.group_start());
  ncclResult_t queued = ncclSuccess;
  std::exception_ptr thrown;
  try {
    queued = enqueue(comm_);
  } catch (...) {
    thrown = std::current_exception();
  }
  // Also after an error: a group that is left open would swallow all that this thread launches later.
  const ncclResult_t ended = api_.group_end();
  stop_if_aborted();
  if (thrown) std::rethrow_exception(thrown);
  check(queued);
  check(ended);
  // Until NCCL says that it is done with it, the launch need not be on its stream.
  if (ended == ncclInProgress || queued == ncclInProgress) await_ready(patience);
}

ncclWindow_t NcclLink::register_window(void* memory, size_t bytes, const Patience& patience) {
  std::lock_guard lock(mutex_);
  stop_if_aborted();
  ncclWindow_t& window = windows_.emplace_back(nullptr);
  const ncclResult_t registered = api_.comm_window_register(comm_, memory, bytes, &window, NCCL_WIN_COLL_SYMMETRIC);
  stop_if_aborted();
  check(registered);
  if (registered == ncclInProgress) await_ready(patience);
  return window;
}

void NcclLink::deregister_window(ncclWindow_t window) {
  if (is_aborted_) return;  // without the lock, which an abort that hangs keeps
  std::lock_guard lock(mutex_);
  if (is_aborted_ || comm_ == nullptr) return;
  check(api_.comm_window_deregister(comm_, window));
}

std::string NcclLink::async_error() {
  if (!is_connected()) return {};
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock || is_aborted_ || comm_ == nullptr) return {};
  ncclResult_t state = ncclSuccess;
  const ncclResult_t asked = api_.comm_get_async_error(comm_, &state);
  return is_bad(asked) ? api_.describe(asked, comm_) : why_bad(api_, state, comm_);
}

void NcclLink::close(c10::Device device, const Patience& patience) {
  std::lock_guard lock(mutex_);
  stop_if_aborted();
  const ncclComm_t comm = comm_.exchange(nullptr);
  if (comm == nullptr) return;
  is_connected_ = false;
  call_beside(
      device,
      [api = &api_, comm] {
        std::string reason = why_bad(*api, api->comm_finalize(comm), comm);
        if (reason.empty()) reason = why_not_ready(*api, comm);
        const auto freed = reason.empty() ? api->comm_destroy(comm) : api->comm_abort(comm);
        return reason.empty() ? why_bad(*api, freed, nullptr) : reason;
      },
      patience);
}

void NcclLink::abort(std::span<NcclLink* const> links) {
  for (NcclLink* link : links) link->is_aborted_.store(true, std::memory_order_release);
  std::vector<std::unique_lock<std::timed_mutex>> locks;
  for (NcclLink* link : links) {
    locks.emplace_back(link->mutex_, std::defer_lock);
    // Where the lock does not come, a call of NCCL's hangs; it is an abort that ends it.
    (void)locks.back().try_lock_for(kAbortGrace);
  }
  const NcclApi& api = links.front()->api_;
  const auto tell = [&](ncclResult_t result) {
    if (is_bad(result)) log().warn("aborting an NCCL communicator failed: {}", api.describe(result, nullptr));
  };
  tell(api.group_start());
  std::vector<ncclComm_t> aborted;
  for (NcclLink* link : links) {
    aborted.push_back(link->comm_);
    if (aborted.back() != nullptr) tell(api.comm_abort(aborted.back()));
  }
  tell(api.group_end());
  for (size_t i = 0; i < links.size(); ++i) {
    if (!locks[i]) {
      locks[i].lock();
      // It was being made while the lock was held, and could not be aborted before.
      if (links[i]->comm_ != aborted[i]) tell(api.comm_abort(links[i]->comm_));
    }
    links[i]->is_connected_ = false;
    links[i]->comm_ = nullptr;
  }
}

NcclScaledSum::NcclScaledSum(const NcclApi& api, double scale, ncclDataType_t dtype, ncclComm_t comm)
    : api_(api), comm_(comm) {
  // NCCL reads the factor as a value of the dtype that is summed.
  std::array<std::byte, sizeof(double)> factor;
  const auto put = [&factor](auto value) { std::memcpy(factor.data(), &value, sizeof(value)); };
  switch (dtype) {
    case ncclFloat64:
      put(scale);
      break;
    case ncclFloat16:
      put(c10::Half(static_cast<float>(scale)));
      break;
    case ncclBfloat16:
      put(c10::BFloat16(static_cast<float>(scale)));
      break;
    default:
      put(static_cast<float>(scale));
  }
  const ncclResult_t made =
      api_.red_op_create_pre_mul_sum(&op_, factor.data(), dtype, ncclScalarHostImmediate, comm_);
  if (is_bad(made)) throw CommError(api_.describe(made, comm_));
}

NcclScaledSum::~NcclScaledSum() {
  const ncclResult_t destroyed = api_.red_op_destroy(op_, comm_);
  if (is_bad(destroyed)) log().warn("destroying an NCCL reduction operator failed: {}", api_.describe(destroyed, comm_));
}

}  // namespace fsdp
