#include "comm/nccl/nccl_memory.hpp"

#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>
#include <fmt/format.h>

#include <thread>

#include "base/first_line.hpp"
#include "base/log.hpp"
#include "base/require.hpp"
#include "comm/nccl/nccl_group.hpp"

namespace fsdp {
namespace {

using Clock = std::chrono::steady_clock;

/// What CUDA gives out at once; a window's memory is to begin and to end at a multiple of NCCL_WIN_REQUIRED_ALIGNMENT.
constexpr int64_t kGranularity = 2 << 20;
static_assert(kGranularity % NCCL_WIN_REQUIRED_ALIGNMENT == 0);

/// How long the end of memory waits for who uses it.
constexpr auto kFreePatience = std::chrono::seconds(10);

bool await(const StreamEvent& event, Clock::time_point end) {
  while (!event.is_done()) {
    if (Clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

}  // namespace

int64_t NcclBlock::whole(int64_t bytes) { return (bytes + kGranularity - 1) / kGranularity * kGranularity; }

std::shared_ptr<NcclBlock> NcclBlock::allocate(NcclMemorySource source, int64_t bytes) {
  const c10::DeviceGuard on_device(source.streams->device());
  void* memory = nullptr;
  const ncclResult_t result = source.api.mem_alloc(&memory, static_cast<size_t>(bytes));
  const bool is_made = result == ncclSuccess && memory != nullptr;
  if (!is_made) log().info("NCCL could not allocate {} bytes of symmetric memory: {}", bytes,
                           source.api.describe(result, nullptr));
  return is_made ? std::make_shared<NcclBlock>(std::move(source), memory, bytes) : nullptr;
}

NcclBlock::~NcclBlock() {
  try {
    if (may_be_replayed_) {
      log().warn("a CUDA graph that is still there may use a buffer that NCCL allocated; the buffer is not freed");
      return;
    }
    const c10::DeviceGuard on_device(source_.streams->device());
    // Unlike LibTorch's, this memory is unmapped when it is freed: nothing may be running that uses it.
    const bool is_quiet =
        source_.await_quiet(kFreePatience) && (released_ == nullptr || await(*released_, Clock::now() + kFreePatience));
    if (!is_quiet) {
      log().warn("the device has not finished with a buffer that NCCL allocated; the buffer is not freed");
      return;
    }
    const ncclResult_t freed = source_.api.mem_free(memory_);
    if (freed != ncclSuccess) log().warn("freeing a buffer that NCCL allocated failed: {}",
                                         source_.api.describe(freed, nullptr));
  } catch (const std::exception& error) {
    log().warn("freeing a buffer that NCCL allocated failed: {}", first_line(error.what()));
  }
}

at::Tensor NcclBlock::take(int64_t bytes) {
  require_state(!is_taken_.exchange(true),
                "a buffer in symmetric memory cannot be used again: a tensor on this rank still refers to the values of an "
                "earlier collective; release that tensor, or clone it");
  auto& streams = *source_.streams;
  const auto device = streams.device();
  auto tensor = at::for_blob(memory_, {bytes})
                    .deleter([block = shared_from_this()](void*) { block->let_go(); })
                    .options(at::TensorOptions().dtype(at::kByte).device(device))
                    .target_device(device)
                    .make_tensor();
  std::lock_guard lock(mutex_);
  const StreamHandle current = streams.current();
  const bool is_capturing = streams.is_capturing(current);
  if (is_capturing) note_captured();
  if (released_ != nullptr && !is_capturing) streams.wait(current, *released_);
  return tensor;
}

void NcclBlock::let_go() noexcept {
  try {
    const c10::DeviceGuard on_device(source_.streams->device());
    const StreamHandle current = source_.streams->current();
    std::lock_guard lock(mutex_);
    released_ = source_.streams->is_capturing(current) ? nullptr : source_.streams->record(current);
  } catch (const std::exception& error) {
    log().warn("releasing a buffer that NCCL allocated failed: {}", first_line(error.what()));
  }
  is_taken_ = false;
}

NcclSlot::~NcclSlot() { group_->let_go_of_slot(block_); }

at::Tensor NcclSlot::take(int64_t bytes) {
  require(bytes <= bytes_, "a buffer of {} bytes in symmetric memory cannot hold {} bytes", bytes_, bytes);
  return block_->take(bytes);
}

}  // namespace fsdp
