#include "comm/nccl/nccl_windows.hpp"

#include <fmt/format.h>

#include <thread>
#include <utility>

#include "base/log.hpp"

namespace fsdp {
namespace {

constexpr auto kAnswerPoll = std::chrono::milliseconds(1);

}  // namespace

std::string NcclWindows::next_request(int64_t bytes, const char* use) {
  return fmt::format("slot_{}_of_{}_bytes_for_{}", requests_++, bytes, use);
}

/// Whether all ranks say yes; the same answer on all. Waits for them.
bool NcclWindows::all_say(bool yes, const std::string& question, const Patience& patience) {
  const auto said = [&](const char* what, int64_t more) {
    return group_.store->add(fmt::format("{}/{}", question, what), more);
  };
  if (!yes) said("no", 1);
  for (int64_t answers = said("all", 1); answers < group_.size; answers = said("all", 0)) {
    patience();
    std::this_thread::sleep_for(kAnswerPoll);
  }
  return said("no", 0) == 0;
}

bool NcclWindows::enroll(const std::shared_ptr<NcclBlock>& block, const std::string& request, const Patience& patience,
                         const std::function<ncclWindow_t()>& register_it) {
  // A rank that came without memory would leave the others waiting in NCCL.
  bool is_made = all_say(block != nullptr, request + "/memory", patience);
  if (is_made) {
    block->set_window(register_it());
    is_made = all_say(block->has_window(), request + "/window", patience);
  }
  if (is_made) {
    std::lock_guard lock(mutex_);
    blocks_.push_back(block);
  } else {
    may_exist_ = false;
    warn_once(fmt::format("group '{}': NCCL or the driver cannot provide symmetric memory on all {} ranks; collectives use "
                          "buffers of LibTorch's allocator instead",
                          group_.name, group_.size));
  }
  return is_made;
}

void NcclWindows::note_captured(std::span<const at::Tensor> tensors) {
  std::lock_guard lock(mutex_);
  for (const auto& known : blocks_)
    if (const auto block = known.lock())
      for (const at::Tensor& tensor : tensors)
        if (tensor.defined() && block->contains(tensor.const_data_ptr())) block->note_captured();
}

void NcclWindows::keep(std::shared_ptr<NcclBlock> block) {
  std::lock_guard lock(mutex_);
  if (block->has_window()) kept_blocks_.push_back(std::move(block));
}

void NcclWindows::drop_kept() {
  std::vector<std::shared_ptr<NcclBlock>> unused;  // go without the lock
  std::lock_guard lock(mutex_);
  unused.swap(kept_blocks_);
}

std::vector<std::shared_ptr<NcclBlock>> NcclWindows::take_blocks() {
  std::vector<std::shared_ptr<NcclBlock>> blocks;
  std::lock_guard lock(mutex_);
  for (const auto& known : std::exchange(blocks_, {}))
    if (auto block = known.lock()) blocks.push_back(std::move(block));
  return blocks;
}

}  // namespace fsdp
