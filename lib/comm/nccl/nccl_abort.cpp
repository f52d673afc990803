#include "comm/nccl/nccl_abort.hpp"

#include <thread>
#include <utility>

namespace fsdp {
namespace {

std::shared_future<void> start(std::function<void()> work) {
  std::promise<void> done;
  auto ended = done.get_future().share();
  std::thread([work = std::move(work), done = std::move(done)]() mutable {
    work();
    done.set_value();
  }).detach();
  return ended;
}

}  // namespace

void NcclAbort::begin(const std::string& reason, std::function<void()> end_links, std::function<void()> tell_others) {
  failure_.set(reason);
  std::lock_guard lock(mutex_);
  if (links_ended_.valid()) return;
  links_ended_ = start(std::move(end_links));
  others_told_ = start(std::move(tell_others));
}

NcclAbort::Links NcclAbort::await_links(std::chrono::steady_clock::time_point end) const {
  std::unique_lock lock(mutex_);
  const auto ended = links_ended_;
  lock.unlock();
  if (!ended.valid()) return Links::kAreUsed;
  return ended.wait_until(end) == std::future_status::ready ? Links::kHaveEnded : Links::kAreEnding;
}

void NcclAbort::await(std::chrono::steady_clock::time_point end) const {
  std::unique_lock lock(mutex_);
  const auto links_ended = links_ended_, others_told = others_told_;
  lock.unlock();
  for (const auto& one : {links_ended, others_told})
    if (one.valid()) (void)one.wait_until(end);
}

}  // namespace fsdp
