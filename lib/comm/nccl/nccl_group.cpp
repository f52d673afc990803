#include "comm/nccl/nccl_group.hpp"

#include <c10/core/DeviceGuard.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <exception>
#include <thread>
#include <utility>

#include "base/first_line.hpp"
#include "base/log.hpp"
#include "comm/nccl/nccl_rendezvous.hpp"
#include "fsdp/error.hpp"

namespace fsdp {
namespace {

using Clock = std::chrono::steady_clock;

/// How many looks of the watchdog go by before the first look for notes of other ranks, and between two of them.
constexpr int kLooksPerNotice = 10;
/// How long the end of a group waits for NCCL's abort, and for the device after it.
constexpr auto kLeavePatience = std::chrono::seconds(10);
/// How long it waits for graphs that have captured collectives: whoever closes the group may destroy them after it.
constexpr auto kGraphPatience = std::chrono::seconds(1);

}  // namespace

class NcclGroup::FlightWork final : public Work {
 public:
  FlightWork(std::shared_ptr<NcclGroup> group, NcclChannel& channel, std::shared_ptr<NcclFlight> flight)
      : group_(std::move(group)), channel_(channel), flight_(std::move(flight)) {}

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
    channel_.let_go(*flight_);
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
    return group_->abort_.has_begun() || flight_->done->is_done();
  }

 private:
  std::shared_ptr<NcclGroup> group_;
  NcclChannel& channel_;  // the group's
  std::shared_ptr<NcclFlight> flight_;
  bool was_waited_for_ = false;
};

NcclGroup::NcclGroup(NcclGroupConfig config)
    : config_(std::move(config)),
      gathers_("gathers", *config_.api, config_.streams->make_stream(StreamPriority::kHigh),
               config_.gathers_cta_policy),
      reductions_("reductions", *config_.api, config_.streams->make_stream(StreamPriority::kHigh),
                  NCCL_CONFIG_UNDEF_INT),
      windows_(config_),
      last_notice_(Clock::now()) {}

// --- launches

void NcclGroup::check(const CollectiveInfo& info) const {
  if (abort_.has_begun()) [[unlikely]]
    info.fail(abort_.reason());
}

std::shared_ptr<Work> NcclGroup::launch(NcclChannel& channel, NcclCollective collective) {
  check(collective.info);
  if (collective.info.bytes == 0) return completed_work();
  auto flight = std::make_shared<NcclFlight>(NcclFlight{.info = std::move(collective.info)});
  try {
    const c10::DeviceGuard on_device(config_.streams->device());
    if (!channel.link().is_connected()) connect(channel);
    enqueue(channel, collective, flight);
  } catch (const std::exception& error) {
    fail(first_line(error.what()));
    flight->info.fail(abort_.reason());
  }
  return std::make_shared<FlightWork>(shared_from_this(), channel, std::move(flight));
}

void NcclGroup::enqueue(NcclChannel& channel, NcclCollective& collective, const std::shared_ptr<NcclFlight>& flight) {
  auto& streams = *config_.streams;
  const StreamHandle current = streams.current();
  flight->is_captured = streams.is_capturing(current);
  if (flight->is_captured) {
    has_captured_ = true;
    windows_.note_captured(collective.tensors);
  }
  streams.wait(channel.stream(), *streams.record(current));
  channel.begin(flight, std::move(collective.tensors));
  channel.link().launch([&](ncclComm_t comm) { return collective.enqueue(comm, channel.stream()); },
                        patience([this] { return fmt::format("not launched within {} ms", config_.timeout.count()); }));
  channel.note_launched(*flight, streams.record(channel.stream()));
}

Patience NcclGroup::patience(std::function<std::string()> too_late) {
  const auto begin = Clock::now();
  const auto notice_interval = kLooksPerNotice * config_.watch_interval;
  return [this, begin, notice_interval, last = begin, too_late = std::move(too_late)]() mutable {
    if (abort_.has_begun()) throw CommError(abort_.reason());
    const auto now = Clock::now();
    if (now - begin > config_.timeout) throw CommError(too_late());
    if (now - last < notice_interval) return;
    last = now;
    if (const std::string found = why_others_left(config_); !found.empty()) throw CommError(found);
  };
}

void NcclGroup::connect(NcclChannel& channel) {
  const Patience patient = patience([&] {
    const std::string missing = missing_ranks(config_, channel.name());
    return missing.empty() ? fmt::format("all ranks came, but NCCL did not connect them within {} ms",
                                         config_.timeout.count())
                           : fmt::format("no sign of rank(s) {} within {} ms, while NCCL was connecting the group",
                                         missing, config_.timeout.count());
  });
  const ncclUniqueId id = exchange_id(config_, channel.name(), patient);
  channel.link().connect(id, config_.rank, config_.size, config_.streams->device(), patient);
}

// --- what the watchdog looks for

void NcclGroup::look(std::vector<at::Tensor>& unused) {
  try {
    const c10::DeviceGuard on_device(config_.streams->device());
    for (NcclChannel* channel : {&gathers_, &reductions_}) channel->settle(unused);
  } catch (const std::exception& error) {
    fail(first_line(error.what()));  // an error of the device, which every later question would bring again
  }
  if (abort_.has_begun()) return;
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
  if (const std::string found = why_others_left(config_); !found.empty()) fail(found);
}

std::shared_ptr<NcclFlight> NcclGroup::oldest() const {
  auto gather = gathers_.oldest(), reduction = reductions_.oldest();
  return !gather || (reduction && reduction->begin < gather->begin) ? reduction : gather;
}

/// Asks NCCL.
void NcclGroup::find_failure() {
  if (abort_.has_begun()) return;
  for (NcclChannel* channel : {&gathers_, &reductions_})
    if (const std::string error = channel->link().async_error(); !error.empty()) return fail(error);
}

// --- its end

void NcclGroup::fail(const std::string& reason) {
  abort_.begin(reason, [self = shared_from_this()] { self->abort_links(); },
               [self = shared_from_this()] { tell_why_left(self->config_, self->abort_.reason()); });
}

void NcclGroup::abort_links() {
  try {
    // A new thread's device is 0, of which NCCL would make a context.
    const c10::DeviceGuard on_device(config_.streams->device());
    const std::array<NcclLink*, 2> links = {&gathers_.link(), &reductions_.link()};
    NcclLink::abort(links);
  } catch (const std::exception& error) {
    log().warn("aborting group '{}' failed: {}", config_.name, first_line(error.what()));
  }
}

void NcclGroup::close() {
  if (std::uncaught_exceptions() > 0) fail("this rank was ended by an exception");
  if (!abort_.has_begun()) close_links();
  finish_flights();
  windows_.drop_kept();
}

void NcclGroup::close_links() {
  try {
    const c10::DeviceGuard on_device(config_.streams->device());
    for (NcclChannel* channel : {&gathers_, &reductions_})
      if (!await_quiet(*channel, config_.timeout))
        throw CommError(fmt::format("the last collectives were not done within {} ms", config_.timeout.count()));
    if (has_captured_) await_replays();
    const auto blocks = windows_.take_blocks();
    for (const auto& block : blocks) give_back_window(*block);
    bool have_ended = true;
    for (NcclChannel* channel : {&gathers_, &reductions_}) have_ended = close_link(*channel) && have_ended;
    // NCCL ends a communicator when no graph has anything of it any more.
    if (have_ended)
      for (const auto& block : blocks) block->forget_captures();
  } catch (const std::exception& error) {
    log().warn("closing group '{}' on rank {} failed: {}", config_.name, config_.rank, first_line(error.what()));
    fail(first_line(error.what()));
  }
}

/// Waits for the graph runs that this thread's current stream has been given, which nothing else here knows of.
void NcclGroup::await_replays() {
  auto& streams = *config_.streams;
  if (streams.is_capturing(streams.current())) return;
  const auto behind = streams.record(streams.current());
  for (const auto end = Clock::now() + config_.timeout; !behind->is_done() && Clock::now() < end;)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

/// False: NCCL is not done with it, which is said.
bool NcclGroup::close_link(NcclChannel& channel) {
  struct IsLate {};
  const auto most = has_captured_ ? std::min<std::chrono::milliseconds>(config_.timeout, kGraphPatience) : config_.timeout;
  try {
    channel.link().close(config_.streams->device(), [&, end = Clock::now() + most] {
      if (abort_.has_begun()) throw CommError(abort_.reason());
      if (Clock::now() > end) throw IsLate();
    });
    return true;
  } catch (const IsLate&) {
    if (has_captured_)
      log().warn("group '{}' on rank {}: a CUDA graph that has captured {} of it is still there, and NCCL keeps what the graph "
                 "needs until it goes; destroy graphs before their group",
                 config_.name, config_.rank, channel.name());
    else
      log().warn("group '{}' on rank {}: NCCL did not end its communicator for {} within {} ms; it is left to NCCL",
                 config_.name, config_.rank, channel.name(), most.count());
    return false;
  }
}

/// Waits until the device is done with the tensors; where it does not come to an end, they are never freed.
void NcclGroup::finish_flights() {
  const auto end = Clock::now() + kLeavePatience;
  abort_.await(end);  // what the others are told too: the process may end after this
  for (NcclChannel* channel : {&gathers_, &reductions_})
    if (const size_t kept = channel->finish(end); kept > 0)
      log().warn("group '{}' on rank {}: NCCL did not finish in time; the memory of {} collectives is not freed", config_.name,
                 config_.rank, kept);
}

}  // namespace fsdp
