#pragma once

#include <ATen/record_function.h>

namespace fsdp {

/// While it lives, every range of a root ("FSDP::all_gather (blocks.3)") is an NVTX range, too, which Nsight Systems shows.
/// Ranges of the user's own are left to the user. Needs a LibTorch with CUDA: see `exists`.
class NvtxRanges {
 public:
  NvtxRanges();
  ~NvtxRanges();
  NvtxRanges(const NvtxRanges&) = delete;
  NvtxRanges& operator=(const NvtxRanges&) = delete;
  static bool exists();

 private:
  at::CallbackHandle handle_;
};

/// Shows ranges to NVTX if FSDP_NVTX asks for it: once, and until the process ends. Warns where there is no NVTX.
void show_ranges_to_nvtx_where_asked();

}  // namespace fsdp
