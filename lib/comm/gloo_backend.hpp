#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace fsdp {

struct GlooOptions {
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
  /// All ranks are on this machine: bind to the loopback interface. Otherwise GLOO_SOCKET_IFNAME,
  /// or the interface of this machine's own name.
  bool loopback = false;
  /// Collectives that may make progress at a time; each has a thread.
  int threads = 2;
};

/// A gloo backend whose `_allgather_base` and `_reduce_scatter_base` send every byte once, straight
/// from where it is to where it belongs (see Note [Pairwise exchange]), and whose `abort` wakes
/// whoever waits for one of these two. Returns when all ranks are connected; throws what c10d
/// throws.
c10::intrusive_ptr<c10d::Backend> make_gloo_backend(const c10::intrusive_ptr<c10d::Store>& store,
                                                    int rank, int size, const GlooOptions& options);

}  // namespace fsdp
