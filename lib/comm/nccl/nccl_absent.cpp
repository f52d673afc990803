// Stands in for nccl_backend.cpp and nccl_communicator.cpp in builds without CUDA.
#include "base/require.hpp"
#include "comm/nccl/nccl_backend.hpp"
#include "comm/nccl/nccl_communicator.hpp"

namespace fsdp {

bool has_nccl(int /*devices*/) { return false; }

void choose_cuda_device(int /*local_rank*/) {}

StreamStall cuda_stream_stall() { return nullptr; }

namespace {

[[noreturn]] void refuse() {
  throw UsageError(
      "backend nccl: this libfsdp was built without CUDA; rebuild against the CUDA wheel of torch, "
      "or use backend gloo");
}

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_nccl_backend(
    const c10::intrusive_ptr<c10d::Store>& /*store*/, int /*rank*/, int /*size*/,
    std::chrono::milliseconds /*timeout*/) {
  refuse();
}

std::shared_ptr<Communicator> make_nccl_communicator(NcclWorld /*world*/) { refuse(); }

}  // namespace fsdp
