// The slots of a group.
#include <c10/core/DeviceGuard.h>
#include <fmt/format.h>

#include <exception>
#include <thread>
#include <utility>

#include "base/first_line.hpp"
#include "base/log.hpp"
#include "comm/nccl/nccl_group.hpp"
#include "fsdp/error.hpp"

namespace fsdp {

using Clock = std::chrono::steady_clock;

std::shared_ptr<SymmMemBuffer> NcclGroup::make_slot(SlotUse use, int64_t bytes) {
  if (!abort_.has_begun() && !windows_.may_exist()) return nullptr;
  NcclChannel& channel = channel_of(use);
  std::shared_ptr<NcclBlock> block;  // goes after a failure is known, which it need not wait for then
  try {
    const c10::DeviceGuard on_device(config_.streams->device());
    if (abort_.has_begun()) throw CommError(abort_.reason());
    if (!channel.link().is_connected()) connect(channel);
    const std::string request = windows_.next_request(bytes, channel.name());
    const int64_t whole = NcclBlock::whole(bytes);
    block = make_block(use, whole);
    if (enroll(block, whole, request)) return std::make_shared<NcclSlot>(shared_from_this(), std::move(block), bytes);
    if (block) give_back_window(*block);
    return nullptr;
  } catch (const std::exception& error) {
    fail(first_line(error.what()));
    throw CommError(fmt::format("symmetric memory for {} in group '{}' on rank {} of {} failed: {}", channel.name(),
                                config_.name, config_.rank, config_.size, abort_.reason()),
                    {.operation = "symmetric_memory", .subject = channel.name(), .group = config_.name,
                     .rank = config_.rank, .size = config_.size});
  }
}

/// Null: NCCL gives none.
std::shared_ptr<NcclBlock> NcclGroup::make_block(SlotUse use, int64_t bytes) {
  const NcclChannel& channel = channel_of(use);
  return NcclBlock::allocate(
      {.api = *config_.api,
       .streams = config_.streams,
       .use = use,
       .await_quiet = [self = shared_from_this(), &channel](auto most) { return self->await_quiet(channel, most); }},
      bytes);
}

/// block: null: this rank has none. As NcclWindows::enroll. While NCCL registers it the watchdog sees a collective under way,
/// as NCCL's own wait for the other ranks has no end.
bool NcclGroup::enroll(const std::shared_ptr<NcclBlock>& block, int64_t bytes, const std::string& request) {
  NcclChannel& channel = channel_of(block ? block->use() : SlotUse::kGathers);
  const Patience patient = patience([&] {
    return fmt::format("not all of the {} ranks allocated symmetric memory ({}) within {} ms; all ranks must gather and "
                       "reduce the same groups, with the same sizes, in the same order",
                       config_.size, request, config_.timeout.count());
  });
  return windows_.enroll(block, request, patient, [&] {
    const CollectiveInfo info("registration", channel.name(), config_.name, config_.rank, config_.size, bytes);
    const auto flight = std::make_shared<NcclFlight>(NcclFlight{.info = info});
    channel.begin(flight, {});
    const ncclWindow_t window = channel.link().register_window(block->memory(), static_cast<size_t>(bytes), patient);
    channel.note_launched(*flight, config_.streams->record(channel.stream()));
    return window;
  });
}

void NcclGroup::let_go_of_slot(std::shared_ptr<NcclBlock> block) noexcept {
  if (block->may_be_replayed())
    warn_once(fmt::format("group '{}': a CUDA graph has captured collectives of symmetric memory that is let go of; the memory "
                          "stays until the group ends, as the graph may run again; destroy graphs before what they captured",
                          config_.name));
  // What is under way when an exception ends a step may never end: nothing is to wait for it here.
  if (std::uncaught_exceptions() > 0 || block->may_be_replayed())
    windows_.keep(std::move(block));
  else
    give_back_window(*block);
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

}  // namespace fsdp
