#pragma once

#include <chrono>
#include <cstdint>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/debug/stream_stall.hpp"

namespace fsdp {

/// Bytes of a rank's piece (see Communicator::packs_below). Below it a collective costs NCCL its latency, some 10 us for a few
/// ranks, whatever its length, and a place of its own in the launch some us of the host's time; packing costs two copies at
/// the device's bandwidth, under a us for a piece of this length on 8 ranks. An estimate: to be measured on GPUs.
inline constexpr int64_t kNcclPacksBelow = 64 << 10;

/// True if the library was built with NCCL and this process sees `devices` CUDA devices or more.
bool has_nccl(int devices);

/// Makes the local rank's device the current one if the process has not chosen another yet.
void choose_cuda_device(int local_rank);

/// Null in a build without CUDA.
StreamStall cuda_stream_stall();

/// A NCCL backend. NCCL itself connects at the first collective. Throws UsageError in a build
/// without.
c10::intrusive_ptr<c10d::Backend> make_nccl_backend(const c10::intrusive_ptr<c10d::Store>& store,
                                                    int rank, int size,
                                                    std::chrono::milliseconds timeout);

}  // namespace fsdp
