#pragma once

namespace fsdp {

/// True in a thread of `run_ranks`, which has no default world.
bool runs_as_thread_rank();

}  // namespace fsdp
