#pragma once

namespace fsdp {

/// A group's backend that holds a connection to each of the other ranks. Any thread.
class HasPeerConnections {
 public:
  /// Ends them: what waits for a peer fails, here and there, and so does what is started later. On the other ranks it looks as
  /// if this process had ended.
  virtual void disconnect() noexcept = 0;
  /// Fails collectives that wait for a peer whose connection has ended, where the backend does not see it by itself. To be
  /// called now and then by who waits.
  virtual void fail_stuck_waits() noexcept = 0;

 protected:
  ~HasPeerConnections() = default;
};

}  // namespace fsdp
