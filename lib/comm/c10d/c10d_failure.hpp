#pragma once

#include <mutex>
#include <string>

#include "comm/failure_flag.hpp"
#include "comm/peer_connections.hpp"

namespace fsdp {

// Note [One rank's error is every rank's]
// A rank whose collective has failed takes no further part in its group, but its process may live on: it may catch the error,
// or wait for a thread that communicates in another group. Its connections look healthy, so the other ranks would wait for it
// until their timeout; two ranks that wait for each other in two groups would do so even where both have failed. So a group's
// first error also ends its connections, where the backend has some.

/// Why a group over c10d has failed, if it has. Thread-safe.
class C10dFailure : public FailureFlag {
 public:
  /// connections: of the group's own backend; null where it has none, or others use it too.
  explicit C10dFailure(HasPeerConnections* connections = nullptr) : connections_(connections) {}

  /// Sets the reason and ends the connections, unless there is a reason already: the first one stays.
  void fail(const std::string& reason);
  /// Ends the connections: this rank takes no further part.
  void disconnect() noexcept;
  /// See HasPeerConnections.
  void fail_stuck_waits() noexcept;
  /// Forgets the connections. To be called before the backend goes, as works of the group may outlive it.
  void forget_connections() noexcept;

 private:
  std::mutex mutex_;
  HasPeerConnections* connections_;
};

}  // namespace fsdp
