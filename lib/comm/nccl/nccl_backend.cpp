// Compiled in builds with CUDA only; nccl_absent.cpp stands in for it in the others.
#include "comm/nccl/nccl_backend.hpp"

#include <c10/cuda/CUDAFunctions.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

namespace fsdp {

bool has_nccl(int devices) { return devices > 0 && c10::cuda::device_count() >= devices; }

void choose_cuda_device(int local_rank) {
  const int devices = c10::cuda::device_count();
  // One visible device per process (CUDA_VISIBLE_DEVICES set by the launcher) is device 0
  // everywhere.
  if (local_rank < devices && c10::cuda::current_device() == 0)
    c10::cuda::set_device(static_cast<c10::DeviceIndex>(local_rank));
}

c10::intrusive_ptr<c10d::Backend> make_nccl_backend(const c10::intrusive_ptr<c10d::Store>& store,
                                                    int rank, int size,
                                                    std::chrono::milliseconds timeout) {
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = timeout;
  return c10::make_intrusive<c10d::ProcessGroupNCCL>(store, rank, size, std::move(options));
}

}  // namespace fsdp
