#include "comm/nccl/nccl_group.hpp"

#include <c10/core/DeviceGuard.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <thread>

#include "base/log.hpp"
#include "fsdp/error.hpp"

namespace fsdp {
namespace {

using Clock = std::chrono::steady_clock;

/// How many looks of the watchdog go by before the first look for notes of other ranks, and between two of them.
constexpr int kLooksPerNotice = 10;
constexpr auto kStorePoll = std::chrono::milliseconds(5);
/// How long the end of a group waits for NCCL's abort, and for the device after it.
constexpr auto kLeavePatience = std::chrono::seconds(10);

std::string first_line(std::string_view text) { return std::string(text.substr(0, text.find('\n'))); }

std::string rank_key(const char* channel, int rank) { return fmt::format("{}/rank_{}", channel, rank); }

}  // namespace

struct NcclGroup::Flight {
  CollectiveInfo info;
  Clock::time_point begin = Clock::now();
  std::vector<at::Tensor> tensors = {};         // guarded by the group's mutex
  std::shared_ptr<StreamEvent> done = nullptr;  // set once, under the group's mutex; null: not on its stream yet
  bool is_captured = false;
};

class NcclGroup::FlightWork final : public Work {
 public:
  FlightWork(std::shared_ptr<NcclGroup> group, std::shared_ptr<Flight> flight)
      : group_(std::move(group)), flight_(std::move(flight)) {}

  void wait() override {
    if (!was_waited_for_) {
      group_->find_failure();
      group_->check(flight_->info);
    }
    auto& streams = *group_->config_.streams;
    streams.wait(streams.current(), *flight_->done);
    if (was_waited_for_) return;
    group_->check(flight_->info);  // where the host waits for streams, it may have been for the abort's sake
    was_waited_for_ = true;
    // What reuses the memory on the stream that waits now runs behind the collective. Keeping it until the device
    // is that far would cost a step's worth of buffers where the host runs ahead.
    std::vector<at::Tensor> unused;
    std::lock_guard lock(group_->mutex_);
    unused.swap(flight_->tensors);
  }

  bool hold_back(Communicator& other) override {
    if (!other.waits_in_streams()) return false;
    auto& streams = *group_->config_.streams;
    streams.wait(streams.current(), *flight_->done);
    return true;
  }

  bool is_completed() override {
    if (flight_->is_captured) return true;
    group_->find_failure();
    return group_->failure_.is_set() || flight_->done->is_done();
  }

 private:
  std::shared_ptr<NcclGroup> group_;
  std::shared_ptr<Flight> flight_;
  bool was_waited_for_ = false;
};

NcclGroup::NcclGroup(NcclGroupConfig config)
    : config_(std::move(config)),
      gathers_("gathers", *config_.api, config_.streams->make_stream(StreamPriority::kHigh),
               config_.gathers_cta_policy),
      reductions_("reductions", *config_.api, config_.streams->make_stream(StreamPriority::kHigh),
                  NCCL_CONFIG_UNDEF_INT),
      last_notice_(Clock::now()) {}

void NcclGroup::check(const CollectiveInfo& info) const {
  if (failure_.is_set()) [[unlikely]]
    info.fail(failure_.reason());
}

std::shared_ptr<Work> NcclGroup::launch(Channel& channel, NcclCollective collective) {
  check(collective.info);
  if (collective.info.bytes == 0) return completed_work();
  auto flight = std::make_shared<Flight>(Flight{.info = std::move(collective.info)});
  const c10::DeviceGuard on_device(config_.streams->device());
  try {
    if (!channel.link.is_connected()) connect(channel);
    auto& streams = *config_.streams;
    const StreamHandle current = streams.current();
    flight->is_captured = streams.is_capturing(current);
    if (flight->is_captured) has_captured_ = true;
    streams.wait(channel.stream, *streams.record(current));
    {
      std::lock_guard lock(mutex_);
      flight->tensors = std::move(collective.tensors);
      // Captured work runs when its graph does: there is nothing to watch, and the graph's memory stays its own.
      if (!flight->is_captured) channel.flights.push_back(flight);
    }
    channel.link.launch([&](ncclComm_t comm) { return collective.enqueue(comm, channel.stream); },
                        patience([this] { return fmt::format("not launched within {} ms", config_.timeout.count()); }));
    auto done = streams.record(channel.stream);
    std::lock_guard lock(mutex_);
    flight->done = std::move(done);
  } catch (const std::exception& error) {
    fail(first_line(error.what()));
    flight->info.fail(failure_.reason());
  }
  return std::make_shared<FlightWork>(shared_from_this(), std::move(flight));
}

Patience NcclGroup::patience(std::function<std::string()> too_late) {
  const auto begin = Clock::now();
  const auto notice_interval = kLooksPerNotice * config_.watch_interval;
  return [this, begin, notice_interval, last = begin, too_late = std::move(too_late)]() mutable {
    if (failure_.is_set()) throw CommError(failure_.reason());
    const auto now = Clock::now();
    if (now - begin > config_.timeout) throw CommError(too_late());
    if (now - last < notice_interval) return;
    last = now;
    if (const std::string found = notice(); !found.empty()) throw CommError(found);
  };
}

void NcclGroup::connect(Channel& channel) {
  const Patience patient = patience([&] {
    const std::string missing = missing_ranks(channel);
    return missing.empty() ? fmt::format("all ranks came, but NCCL did not connect them within {} ms",
                                         config_.timeout.count())
                           : fmt::format("no sign of rank(s) {} within {} ms, while NCCL was to connect the group",
                                         missing, config_.timeout.count());
  });
  const ncclUniqueId id = exchange_id(channel, patient);
  channel.link.connect(id, config_.rank, config_.size, patient);
}

ncclUniqueId NcclGroup::exchange_id(const Channel& channel, const Patience& patience) {
  const std::string key = fmt::format("{}/id", channel.name);
  config_.store->set(rank_key(channel.name, config_.rank), std::vector<uint8_t>{1});
  ncclUniqueId id;
  if (config_.rank == 0) {
    if (const auto made = config_.api->get_unique_id(&id); made != ncclSuccess)
      throw CommError(config_.api->describe(made, nullptr));
    const auto* bytes = reinterpret_cast<const uint8_t*>(&id);
    config_.store->set(key, std::vector<uint8_t>(bytes, bytes + sizeof(id)));
    return id;
  }
  while (!config_.store->check({key})) {
    patience();
    std::this_thread::sleep_for(kStorePoll);
  }
  const auto bytes = config_.store->get(key);
  if (bytes.size() != sizeof(id))
    throw CommError(fmt::format("expected {} bytes of NCCL's id in the store, found {}", sizeof(id), bytes.size()));
  std::memcpy(&id, bytes.data(), sizeof(id));
  return id;
}

std::string NcclGroup::missing_ranks(const Channel& channel) {
  std::vector<int> missing;
  for (int rank = 0; rank < config_.size; ++rank)
    if (!config_.store->check({rank_key(channel.name, rank)})) missing.push_back(rank);
  return fmt::format("{}", fmt::join(missing, ", "));
}

void NcclGroup::look(std::vector<at::Tensor>& unused) {
  const c10::DeviceGuard on_device(config_.streams->device());
  try {
    std::lock_guard lock(mutex_);
    settle(gathers_, unused);
    settle(reductions_, unused);
  } catch (const std::exception& error) {
    fail(first_line(error.what()));  // an error of the device, which every later question would bring again
  }
  if (failure_.is_set()) return;
  find_failure();
  const auto first = oldest();
  const bool has_captured = has_captured_;
  if (!first && !has_captured) return;
  const auto now = Clock::now();
  if (first && now - first->begin > config_.timeout)
    return fail(fmt::format("{} of '{}' was not done within {} ms; a rank does not take part in it, or a device hangs",
                            first->info.operation, first->info.subject, config_.timeout.count()));
  const auto interval = kLooksPerNotice * config_.watch_interval;
  // Of a graph that runs nothing is seen here: the others' notes are all there is.
  if ((!has_captured && now - first->begin < interval) || now - last_notice_ < interval) return;
  last_notice_ = now;
  if (const std::string found = notice(); !found.empty()) fail(found);
}

void NcclGroup::settle(Channel& channel, std::vector<at::Tensor>& unused) {
  auto& flights = channel.flights;
  while (!flights.empty() && flights.front()->done && flights.front()->done->is_done()) {
    // Those of a Work that is still there go with its wait, or with it: on the thread that will use the memory again, and
    // not at any time while this one still has them in its hands.
    if (flights.front().use_count() == 1) {
      auto& tensors = flights.front()->tensors;
      std::move(tensors.begin(), tensors.end(), std::back_inserter(unused));
      tensors.clear();
    }
    flights.pop_front();
  }
}

std::shared_ptr<NcclGroup::Flight> NcclGroup::oldest() {
  std::lock_guard lock(mutex_);
  std::shared_ptr<Flight> first;
  for (const Channel* channel : {&gathers_, &reductions_})
    if (!channel->flights.empty() && (!first || channel->flights.front()->begin < first->begin))
      first = channel->flights.front();
  return first;
}

/// Asks NCCL.
void NcclGroup::find_failure() {
  if (failure_.is_set()) return;
  for (Channel* channel : {&gathers_, &reductions_})
    if (const std::string error = channel->link.async_error(); !error.empty()) return fail(error);
}

/// Why another rank has left the group; empty: none has.
std::string NcclGroup::notice() {
  try {
    return config_.notices->read("nccl/" + config_.key).value_or(std::string());
  } catch (const std::exception&) {
    return {};  // whoever served the store is gone; the timeout is left
  }
}

void NcclGroup::fail(const std::string& reason) {
  failure_.set(reason);
  std::lock_guard lock(abort_mutex_);
  if (aborted_.valid()) return;
  // Threads of their own: NCCL may take its time or never return, and the store may be gone.
  const auto start = [self = shared_from_this()](void (NcclGroup::*work)()) {
    std::promise<void> done;
    auto ended = done.get_future().share();
    std::thread([self, work, done = std::move(done)]() mutable {
      ((*self).*work)();
      done.set_value();
    }).detach();
    return ended;
  };
  aborted_ = start(&NcclGroup::abort_links);
  told_ = start(&NcclGroup::tell_others);
}

void NcclGroup::abort_links() {
  try {
    // A new thread's device is 0, of which NCCL would make a context.
    const c10::DeviceGuard on_device(config_.streams->device());
    const std::array<NcclLink*, 2> links = {&gathers_.link, &reductions_.link};
    NcclLink::abort(links);
  } catch (const std::exception& error) {
    log().warn("abort of group '{}': {}", config_.name, first_line(error.what()));
  }
}

void NcclGroup::tell_others() {
  try {
    config_.notices->post_first("nccl/" + config_.key, fmt::format("rank {}: {}", config_.rank, failure_.reason()));
  } catch (const std::exception& error) {
    log().info("group '{}' failed and the other ranks cannot be told: {}", config_.name, first_line(error.what()));
  }
}

void NcclGroup::close() {
  const bool leaves_by_exception = std::uncaught_exceptions() > 0;
  if (leaves_by_exception) fail("this rank was ended by an exception");
  if (!failure_.is_set()) try {
      const c10::DeviceGuard on_device(config_.streams->device());
      give_back_windows();
      for (Channel* channel : {&gathers_, &reductions_})
        channel->link.close(patience([this] {
          return fmt::format("what is under way was not done within {} ms", config_.timeout.count());
        }));
    } catch (const std::exception& error) {
      log().warn("leaving group '{}' on rank {}: {}", config_.name, config_.rank, first_line(error.what()));
      fail(first_line(error.what()));
    }
  await_flights();
  std::vector<std::shared_ptr<NcclBlock>> unused;
  std::lock_guard lock(mutex_);
  unused.swap(kept_blocks_);
}

/// False: what was launched, or an abort, has not come to an end by then.
bool NcclGroup::await_channel(const Channel& channel, std::chrono::milliseconds most) {
  const auto end = Clock::now() + most;
  for (;; std::this_thread::sleep_for(std::chrono::milliseconds(1))) {
    if (failure_.is_set()) {
      std::unique_lock lock(abort_mutex_);
      const auto aborted = aborted_;
      lock.unlock();
      if (aborted.valid()) return aborted.wait_until(end) == std::future_status::ready;
    } else {
      std::unique_lock lock(mutex_);
      const auto last = channel.flights.empty() ? nullptr : channel.flights.back();
      const auto done = last ? last->done : nullptr;
      lock.unlock();
      if (!last || (done && done->is_done())) return true;
    }
    if (Clock::now() > end) return false;
  }
}

/// Until the device is done with the tensors; where it does not come to an end, they are never freed.
void NcclGroup::await_flights() {
  const auto end = Clock::now() + kLeavePatience;
  std::unique_lock abort_lock(abort_mutex_);
  const auto aborted = aborted_, told = told_;
  abort_lock.unlock();
  if (aborted.valid()) (void)aborted.wait_until(end);
  // The process may end after this.
  if (told.valid()) (void)told.wait_until(end);
  std::vector<at::Tensor> unused;
  for (Channel* channel : {&gathers_, &reductions_}) {
    for (;;) {
      std::lock_guard lock(mutex_);
      try {
        settle(*channel, unused);
      } catch (const std::exception&) {
        break;  // a device that fails runs nothing
      }
      if (channel->flights.empty() || !channel->flights.front()->done || Clock::now() > end) break;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    std::lock_guard lock(mutex_);
    if (channel->flights.empty()) continue;
    if (Clock::now() <= end) {
      channel->flights.clear();
      continue;
    }
    log().warn("group '{}' on rank {}: NCCL does not end; the memory of {} collectives is not freed", config_.name,
               config_.rank, channel->flights.size());
    new std::deque<std::shared_ptr<Flight>>(std::move(channel->flights));
  }
}

}  // namespace fsdp
