#include "comm/nccl/nccl_group.hpp"

#include <c10/core/DeviceGuard.h>
#include <fmt/format.h>

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
  const c10::DeviceGuard on_device(config_.streams->device());
  try {
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
  if (flight->is_captured) has_captured_ = true;
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
  channel.link().connect(id, config_.rank, config_.size, patient);
}

// --- memory

std::shared_ptr<SymmMemBuffer> NcclGroup::make_slot(SlotUse use, int64_t bytes) {
  if (!abort_.has_begun() && !windows_.may_exist()) return nullptr;
  const c10::DeviceGuard on_device(config_.streams->device());
  NcclChannel& channel = channel_of(use);
  std::shared_ptr<NcclBlock> block;  // goes after a failure is known, which it need not wait for then
  try {
    if (abort_.has_begun()) throw CommError(abort_.reason());
    if (!channel.link().is_connected()) connect(channel);
    const std::string request = windows_.next_request(bytes, channel.name());
    const Patience patient = patience([&] {
      return fmt::format("not all of the {} ranks allocated symmetric memory ({}) within {} ms; all ranks must gather and "
                         "reduce the same groups, with the same sizes, in the same order",
                         config_.size, request, config_.timeout.count());
    });
    const int64_t whole = NcclBlock::whole(bytes);
    block = NcclBlock::allocate(
        {.api = *config_.api,
         .streams = config_.streams,
         .use = use,
         .await_quiet = [self = shared_from_this(), &channel](auto most) { return self->await_quiet(channel, most); }},
        whole);
    if (windows_.enroll(block, whole, request, channel.link(), patient))
      return std::make_shared<NcclSlot>(shared_from_this(), std::move(block), bytes);
    if (block) give_back_window(*block);
    return nullptr;
  } catch (const std::exception& error) {
    fail(first_line(error.what()));
    throw CommError(fmt::format("symmetric memory for {} in group '{}' on rank {} of {} failed: {}", channel.name(),
                                config_.name,
                                config_.rank, config_.size, abort_.reason()),
                    {.operation = "symmetric_memory", .subject = channel.name(), .group = config_.name,
                     .rank = config_.rank, .size = config_.size});
  }
}

void NcclGroup::give_back_window(NcclBlock& block) noexcept {
  const ncclWindow_t window = block.take_window();
  if (window == nullptr || abort_.has_begun()) return;  // an abort gives back all of them
  try {
    const c10::DeviceGuard on_device(config_.streams->device());
    NcclChannel& channel = channel_of(block.use());
    if (await_quiet(channel, config_.timeout))
      channel.link().deregister_window(window);
    else
      fail(fmt::format("{} were not done within the timeout, so their symmetric memory cannot be freed", channel.name()));
  } catch (const std::exception& error) {
    fail(first_line(error.what()));
  }
}

/// False: what was launched, or an abort, has not come to an end by then.
bool NcclGroup::await_quiet(const NcclChannel& channel, std::chrono::milliseconds most) {
  const auto end = Clock::now() + most;
  for (;; std::this_thread::sleep_for(std::chrono::milliseconds(1))) {
    if (abort_.has_begun()) {
      const auto links = abort_.await_links(end);
      if (links != NcclAbort::Links::kAreUsed) return links == NcclAbort::Links::kHaveEnded;
    } else if (channel.is_quiet()) {
      return true;
    }
    if (Clock::now() > end) return false;
  }
}

// --- what the watchdog looks for

void NcclGroup::look(std::vector<at::Tensor>& unused) {
  const c10::DeviceGuard on_device(config_.streams->device());
  try {
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
    for (const auto& block : windows_.take_blocks()) give_back_window(*block);
    for (NcclChannel* channel : {&gathers_, &reductions_})
      channel->link().close(patience([this] {
        return fmt::format("the last collectives were not done within {} ms", config_.timeout.count());
      }));
  } catch (const std::exception& error) {
    log().warn("closing group '{}' on rank {} failed: {}", config_.name, config_.rank, first_line(error.what()));
    fail(first_line(error.what()));
  }
}

/// Until the device is done with the tensors; where it does not come to an end, they are never freed.
void NcclGroup::finish_flights() {
  const auto end = Clock::now() + kLeavePatience;
  abort_.await(end);  // what the others are told too: the process may end after this
  for (NcclChannel* channel : {&gathers_, &reductions_})
    if (const size_t kept = channel->finish(end); kept > 0)
      log().warn("group '{}' on rank {}: NCCL did not finish in time; the memory of {} collectives is not freed", config_.name,
                 config_.rank, kept);
}

}  // namespace fsdp
