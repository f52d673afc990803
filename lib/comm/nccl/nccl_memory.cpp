#include "comm/nccl/nccl_memory.hpp"

#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>
#include <fmt/format.h>

#include <thread>

#include "base/log.hpp"
#include "base/require.hpp"
#include "comm/nccl/nccl_group.hpp"

namespace fsdp {
namespace {

using Clock = std::chrono::steady_clock;

/// What CUDA gives out at once; a window's memory is to begin and to end at a multiple of NCCL_WIN_REQUIRED_ALIGNMENT.
constexpr int64_t kGranularity = 2 << 20;
static_assert(kGranularity % NCCL_WIN_REQUIRED_ALIGNMENT == 0);

constexpr auto kAnswerPoll = std::chrono::milliseconds(1);
/// How long the end of memory waits for who uses it.
constexpr auto kFreePatience = std::chrono::seconds(10);

bool await(const StreamEvent& event, Clock::time_point end) {
  while (!event.is_done()) {
    if (Clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

std::string first_line_of(std::string_view text) { return std::string(text.substr(0, text.find('\n'))); }

}  // namespace

std::shared_ptr<NcclBlock> NcclBlock::allocate(NcclMemorySource source, int64_t bytes) {
  const c10::DeviceGuard on_device(source.streams->device());
  void* memory = nullptr;
  const ncclResult_t result = source.api.mem_alloc(&memory, static_cast<size_t>(bytes));
  const bool is_made = result == ncclSuccess && memory != nullptr;
  if (!is_made) log().info("no {} bytes of NCCL's memory: {}", bytes, source.api.describe(result, nullptr));
  return is_made ? std::make_shared<NcclBlock>(std::move(source), memory) : nullptr;
}

NcclBlock::~NcclBlock() {
  try {
    const c10::DeviceGuard on_device(source_.streams->device());
    // Unlike LibTorch's, this memory is unmapped when it is freed: nothing may be running that uses it.
    const bool is_quiet =
        source_.await_quiet() && (released_ == nullptr || await(*released_, Clock::now() + kFreePatience));
    if (!is_quiet) {
      log().warn("the device does not come to an end with a buffer of NCCL's; it is not freed");
      return;
    }
    const ncclResult_t freed = source_.api.mem_free(memory_);
    if (freed != ncclSuccess) log().warn("freeing a buffer: {}", source_.api.describe(freed, nullptr));
  } catch (const std::exception& error) {
    log().warn("freeing a buffer of NCCL's: {}", first_line_of(error.what()));
  }
}

at::Tensor NcclBlock::take(int64_t bytes) {
  require_state(!is_taken_.exchange(true),
                "a buffer that all ranks have registered is to be filled again, but a tensor on this rank still refers "
                "to what was in it last; let go of that, or copy it");
  auto& streams = *source_.streams;
  const auto device = streams.device();
  auto tensor = at::for_blob(memory_, {bytes})
                    .deleter([block = shared_from_this()](void*) { block->let_go(); })
                    .options(at::TensorOptions().dtype(at::kByte).device(device))
                    .target_device(device)
                    .make_tensor();
  std::lock_guard lock(mutex_);
  const StreamHandle current = streams.current();
  if (released_ != nullptr && !streams.is_capturing(current)) streams.wait(current, *released_);
  return tensor;
}

void NcclBlock::let_go() noexcept {
  try {
    const c10::DeviceGuard on_device(source_.streams->device());
    const StreamHandle current = source_.streams->current();
    std::lock_guard lock(mutex_);
    released_ = source_.streams->is_capturing(current) ? nullptr : source_.streams->record(current);
  } catch (const std::exception& error) {
    log().warn("letting go of a buffer of NCCL's: {}", first_line_of(error.what()));
  }
  is_taken_ = false;
}

NcclSlot::~NcclSlot() {
  // What is under way when an exception ends a step may never end: nothing is to wait for it here.
  if (std::uncaught_exceptions() > 0)
    group_->keep_until_close(block_);
  else
    group_->give_back_window(*block_);
}

at::Tensor NcclSlot::take(int64_t bytes) {
  require(bytes <= bytes_, "a buffer of {} bytes that all ranks have registered cannot hold {}", bytes_, bytes);
  return block_->take(bytes);
}

/// Whether all ranks say yes; the same answer on all. Waits for them.
bool NcclGroup::all_say(bool yes, const std::string& question, const Patience& patience) {
  const auto said = [&](const char* what, int64_t more) {
    return config_.store->add(fmt::format("{}/{}", question, what), more);
  };
  if (!yes) said("no", 1);
  for (int64_t answers = said("all", 1); answers < config_.size; answers = said("all", 0)) {
    patience();
    std::this_thread::sleep_for(kAnswerPoll);
  }
  return said("no", 0) == 0;
}

std::shared_ptr<CommSlot> NcclGroup::make_slot(SlotUse use, int64_t bytes) {
  if (!failure_.is_set() && !has_windows_) return nullptr;
  const c10::DeviceGuard on_device(config_.streams->device());
  Channel& channel = channel_of(use);
  std::shared_ptr<NcclBlock> block;  // goes after a failure is known, which it need not wait for then
  try {
    if (failure_.is_set()) throw CommError(failure_.reason());
    if (!channel.link.is_connected()) connect(channel);
    // Size and use are part of what is asked, so ranks that differ do not take each other for an answer.
    const std::string question = fmt::format("slot_{}_of_{}_bytes_for_{}", slots_made_++, bytes, channel.name);
    const Patience patient = patience([&] {
      return fmt::format("not all of the {} ranks made {} within {} ms; each is to gather and reduce the same groups, "
                         "of the same sizes, in the same order",
                         config_.size, question, config_.timeout.count());
    });
    const int64_t whole = (bytes + kGranularity - 1) / kGranularity * kGranularity;
    block = NcclBlock::allocate(
        {.api = *config_.api,
         .streams = config_.streams,
         .use = use,
         .await_quiet = [self = shared_from_this(),
                         &channel] { return self->await_channel(channel, kFreePatience); }},
        whole);
    // A rank that came without memory would leave the others waiting in NCCL.
    bool is_made = all_say(block != nullptr, question + "/memory", patient);
    if (is_made) {
      block->window = channel.link.register_window(block->memory(), static_cast<size_t>(whole), patient);
      is_made = all_say(block->window != nullptr, question + "/window", patient);
    }
    if (is_made) {
      std::lock_guard lock(mutex_);
      blocks_.push_back(block);
    } else {
      if (block) give_back_window(*block);
      has_windows_ = false;
      warn_once(fmt::format("group '{}': NCCL or the driver has no memory that all {} ranks can register; buffers of "
                            "collectives stay in LibTorch's",
                            config_.name, config_.size));
      return nullptr;
    }
    return std::make_shared<NcclSlot>(shared_from_this(), std::move(block), bytes);
  } catch (const std::exception& error) {
    fail(first_line_of(error.what()));
    throw CommError(fmt::format("memory for {} in group '{}' on rank {} of {} failed: {}", channel.name, config_.name,
                                config_.rank, config_.size, failure_.reason()));
  }
}

void NcclGroup::give_back_window(NcclBlock& block) noexcept {
  const ncclWindow_t window = block.window.exchange(nullptr);
  if (window == nullptr || failure_.is_set()) return;  // an abort gives back all of them
  try {
    const c10::DeviceGuard on_device(config_.streams->device());
    Channel& channel = channel_of(block.use());
    if (await_channel(channel, config_.timeout))
      channel.link.deregister_window(window);
    else
      fail(fmt::format("{} were not done in time for their memory to be given back", channel.name));
  } catch (const std::exception& error) {
    fail(first_line_of(error.what()));
  }
}

void NcclGroup::keep_until_close(std::shared_ptr<NcclBlock> block) noexcept {
  std::lock_guard lock(mutex_);
  if (block->window != nullptr) kept_blocks_.push_back(std::move(block));
}

void NcclGroup::give_back_windows() {
  std::vector<std::shared_ptr<NcclBlock>> blocks;
  {
    std::lock_guard lock(mutex_);
    for (const auto& known : blocks_)
      if (auto block = known.lock()) blocks.push_back(std::move(block));
    blocks_.clear();
  }
  for (const auto& block : blocks) give_back_window(*block);
}

}  // namespace fsdp
