#pragma once

namespace fsdp {

/// What a program over GPUs gets that names no backend. c10d's NCCL is what the field runs on. "nccl", ours, takes its place
/// when bench/results has a record of GPUs, as docs/gpu.md asks for it, which shows that ours is right on them and faster.
inline constexpr const char* kDefaultGpuBackend = "c10d_nccl";

/// has_gpus: one for each rank of this node.
inline const char* default_backend(int world_size, bool has_gpus) {
  return world_size == 1 ? "single" : has_gpus ? kDefaultGpuBackend : "gloo";
}

}  // namespace fsdp
