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
  /// Threads that wait for messages and add. One, not c10d's two: a ProcessGroupGloo notes the name of
  /// each collective that completes in one std::string without a lock, so that two workers which
  /// finish together corrupt the heap (seen after 400 steps of the default training run). Transfers
  /// do not wait for it: they begin when the collective is started, and gloo's own thread moves them.
  int threads = 1;
};

/// Bytes of a piece below which a message of its own costs more than packing.
inline constexpr int64_t kGlooPacksBelow = 64 << 10;

/// A gloo backend whose all-gather and reduce-scatter of tensors, one or several (coalesced), send
/// every byte once, straight from where it is to where it belongs (see Note [Pairwise exchange]),
/// and whose `abort` wakes whoever waits for one of these two. It has peer connections (peer_connections.hpp). Returns when all
/// ranks are connected; throws what c10d throws.
c10::intrusive_ptr<c10d::Backend> make_gloo_backend(const c10::intrusive_ptr<c10d::Store>& store,
                                                    int rank, int size, const GlooOptions& options);

}  // namespace fsdp
