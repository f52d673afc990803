#include "comm/c10d/c10d_work.hpp"

#include <chrono>
#include <exception>
#include <string>
#include <utility>

#include "comm/c10d/transport_error.hpp"

namespace fsdp {
namespace {

/// How long a wait on the host sleeps before it looks whether the group was aborted.
constexpr auto kAbortPoll = std::chrono::milliseconds(200);

class C10dWork final : public Work {
 public:
  C10dWork(c10::intrusive_ptr<c10d::Work> work, std::shared_ptr<C10dFailure> failure, CollectiveInfo info, HostWait how)
      : work_(std::move(work)), failure_(std::move(failure)), info_(std::move(info)), how_(how) {}

  void wait() override {
    while (!wait_briefly()) {
    }
  }

  bool wait_briefly() override {
    if (!error_.empty()) info_.fail(error_);
    if (work_ == nullptr) return true;
    try {
      if (how_ == HostWait::kInSlices) {
        if (!wait_for_slice()) return false;
      } else if (!work_->wait()) {
        throw CommError("aborted");
      }
    } catch (const std::exception& error) {
      // An abort ends the wait with whatever the backend says then; its reason says more.
      error_ = failure_->is_set() ? failure_->reason() : transport_error(error.what());
      failure_->fail(error_);
      info_.fail(error_);
    }
    // Lets go of the tensors, which the backend's work holds.
    work_ = nullptr;
    return true;
  }

  bool is_completed() override {
    return !error_.empty() || work_ == nullptr || failure_->is_set() || work_->isCompleted();
  }

 private:
  /// False: only this slice of time is over; the group's own timeout is kept by the work.
  bool wait_for_slice() {
    const auto begin = std::chrono::steady_clock::now();
    try {
      if (!work_->wait(kAbortPoll)) throw CommError("aborted");
      return true;
    } catch (const std::exception&) {
      if (!work_->isCompleted()) {
        const bool slice_is_over = std::chrono::steady_clock::now() - begin >= kAbortPoll;
        if (failure_->is_set() || !slice_is_over) throw;
        failure_->fail_stuck_waits();
        return false;
      }
    }
    // One that completed since says itself how.
    work_->wait();
    return true;
  }

  c10::intrusive_ptr<c10d::Work> work_;
  std::shared_ptr<C10dFailure> failure_;
  CollectiveInfo info_;
  HostWait how_;
  std::string error_;
};

}  // namespace

std::shared_ptr<Work> c10d_work(c10::intrusive_ptr<c10d::Work> work, std::shared_ptr<C10dFailure> failure,
                                CollectiveInfo info, HostWait how) {
  return std::make_shared<C10dWork>(std::move(work), std::move(failure), std::move(info), how);
}

}  // namespace fsdp
