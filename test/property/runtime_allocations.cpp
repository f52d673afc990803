#include "property/runtime_allocations.hpp"

#include <ATen/record_function.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <cstring>
#include <string_view>

namespace fsdp::test {
namespace {

thread_local int open_ranges = 0;
thread_local int64_t allocated_bytes = 0;
thread_local std::function<void(std::string_view)> listener;

class RangeCountingAllocator final : public c10::Allocator {
 public:
  explicit RangeCountingAllocator(c10::Allocator* inner) : inner_(inner) {}

  c10::DataPtr allocate(size_t bytes) override {
    if (open_ranges > 0) allocated_bytes += static_cast<int64_t>(bytes);
    return inner_->allocate(bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return inner_->raw_deleter(); }
  void copy_data(void* destination, const void* source, std::size_t bytes) const override {
    std::memcpy(destination, source, bytes);
  }

 private:
  c10::Allocator* inner_;
};

struct OpenRange final : at::ObserverContext {
  OpenRange() { ++open_ranges; }
  ~OpenRange() override { --open_ranges; }
};

/// Ranges around whole boundaries, for readers of a profile. What the runtime allocates for parameters and gradients has ranges of
/// its own inside them; the rest are numbers for the root's checks.
bool is_around_others(std::string_view name) {
  static constexpr std::string_view kAround[] = {"FSDP::root_pre_forward", "FSDP::pre_forward", "FSDP::post_forward",
                                                 "FSDP::pre_backward", "FSDP::post_backward_reshard",
                                                 "FSDP::root_post_backward_callback", "FSDP::forward_prefetch",
                                                 "FSDP::backward_prefetch"};
  return std::ranges::find(kAround, name.substr(0, name.find(' '))) != std::end(kAround);
}

std::unique_ptr<at::ObserverContext> on_range(const at::RecordFunction& range) {
  if (!std::string_view(range.name()).starts_with("FSDP::")) return nullptr;
  if (listener) listener(range.name());
  if (is_around_others(range.name())) return nullptr;
  return std::make_unique<OpenRange>();
}

/// From the program's start on: who allocates in another thread meanwhile would find the allocator half made.
const bool is_watching = [] {
  static RangeCountingAllocator allocator(c10::GetDefaultCPUAllocator());
  c10::SetAllocator(c10::DeviceType::CPU, &allocator, /*priority=*/255);
  at::addGlobalCallback(at::RecordFunctionCallback(&on_range).scopes({at::RecordScope::USER_SCOPE}));
  return true;
}();

}  // namespace

void watch_runtime_allocations() { static_cast<void>(is_watching); }

void listen_to_ranges(std::function<void(std::string_view)> on_start) { listener = std::move(on_start); }

int64_t runtime_allocated_bytes() { return allocated_bytes; }

}  // namespace fsdp::test
