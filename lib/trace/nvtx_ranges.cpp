#include "trace/nvtx_ranges.hpp"

#include <torch/csrc/profiler/stubs/base.h>

#include <memory>
#include <string_view>

#include "base/environment.hpp"
#include "base/log.hpp"

namespace fsdp {

namespace {

/// Marks a range that was pushed.
struct PushedRange : at::ObserverContext {};

std::unique_ptr<at::ObserverContext> push_range(const at::RecordFunction& function) {
  if (!std::string_view(function.name()).starts_with("FSDP::")) return nullptr;
  torch::profiler::impl::cudaStubs()->rangePush(function.name());
  return std::make_unique<PushedRange>();
}

void pop_range(const at::RecordFunction&, at::ObserverContext* pushed) {
  if (pushed != nullptr) torch::profiler::impl::cudaStubs()->rangePop();
}

}  // namespace

NvtxRanges::NvtxRanges()
    : handle_(at::addGlobalCallback(
          at::RecordFunctionCallback(&push_range, &pop_range).scopes({at::RecordScope::USER_SCOPE}))) {}

NvtxRanges::~NvtxRanges() { at::removeCallback(handle_); }

bool NvtxRanges::exists() { return torch::profiler::impl::cudaStubs()->enabled(); }

void show_ranges_to_nvtx_where_asked() {
  [[maybe_unused]] static const bool has_asked = [] {
    if (!environment::shows_nvtx()) return true;
    if (NvtxRanges::exists())
      static_cast<void>(new NvtxRanges);
    else
      warn_once("FSDP_NVTX: this LibTorch has no CUDA, so no NVTX ranges are shown");
    return true;
  }();
}

}  // namespace fsdp
