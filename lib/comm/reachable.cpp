#include "comm/reachable.hpp"

#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <thread>

namespace fsdp {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

/// A host may have several addresses, and the first one may lead nowhere.
constexpr milliseconds kMostForOneAddress{5000};
constexpr milliseconds kBetweenTries{200};

milliseconds until(Clock::time_point deadline) {
  return std::max(milliseconds(0), std::chrono::duration_cast<milliseconds>(deadline - Clock::now()));
}

/// 0, or the number of the error.
int connect_to(const addrinfo& address, milliseconds most) {
  const int connection =
      ::socket(address.ai_family, address.ai_socktype | SOCK_NONBLOCK | SOCK_CLOEXEC, address.ai_protocol);
  if (connection < 0) return errno;
  int error = ::connect(connection, address.ai_addr, address.ai_addrlen) == 0 ? 0 : errno;
  if (error == EINPROGRESS) {
    pollfd waits{.fd = connection, .events = POLLOUT, .revents = 0};
    const auto deadline = Clock::now() + most;
    int ready;
    do ready = ::poll(&waits, 1, static_cast<int>(until(deadline).count()));
    while (ready < 0 && errno == EINTR);
    socklen_t bytes = sizeof(error);
    if (ready == 0)
      error = ETIMEDOUT;
    else if (ready < 0 || ::getsockopt(connection, SOL_SOCKET, SO_ERROR, &error, &bytes) != 0)
      error = errno;
  }
  ::close(connection);
  return error;
}

std::string try_once(const std::string& host, int port, Clock::time_point deadline) {
  addrinfo wanted{};
  wanted.ai_socktype = SOCK_STREAM;
  wanted.ai_flags = AI_NUMERICSERV;
  addrinfo* found = nullptr;
  if (const int error = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &wanted, &found); error != 0)
    return ::gai_strerror(error);
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> addresses(found, ::freeaddrinfo);
  int error = 0;
  for (const addrinfo* address = found; address != nullptr; address = address->ai_next) {
    error = connect_to(*address, std::min(kMostForOneAddress, until(deadline)));
    if (error == 0) return {};
  }
  return std::strerror(error);
}

}  // namespace

std::string why_unreachable(const std::string& host, int port, milliseconds timeout) {
  const auto deadline = Clock::now() + timeout;
  for (;;) {
    const auto why = try_once(host, port, deadline);
    if (why.empty() || Clock::now() >= deadline) return why;
    std::this_thread::sleep_for(std::min(kBetweenTries, until(deadline)));
  }
}

}  // namespace fsdp
