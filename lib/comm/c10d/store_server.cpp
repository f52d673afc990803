#include "comm/c10d/store_server.hpp"

#include <arpa/inet.h>
#include <poll.h>
#include <sys/socket.h>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <string>

#include "comm/bounded_store.hpp"

namespace fsdp {

namespace {

bool leads_to(int socket, uint16_t port) {
  sockaddr_storage peer{};
  socklen_t size = sizeof(peer);
  if (getpeername(socket, reinterpret_cast<sockaddr*>(&peer), &size) != 0) return false;
  if (peer.ss_family == AF_INET) return ntohs(reinterpret_cast<const sockaddr_in&>(peer).sin_port) == port;
  return peer.ss_family == AF_INET6 && ntohs(reinterpret_cast<const sockaddr_in6&>(peer).sin6_port) == port;
}

bool is_closed_there(int socket) {
  pollfd asked{.fd = socket, .events = POLLRDHUP, .revents = 0};
  return poll(&asked, 1, /*timeout=*/0) > 0 && (asked.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0;
}

}  // namespace

std::optional<uint16_t> server_port_of(const c10::intrusive_ptr<c10d::Store>& store) {
  auto below = store;
  for (;;) {
    if (auto* prefixed = dynamic_cast<c10d::PrefixStore*>(below.get()))
      below = prefixed->getUnderlyingStore();
    else if (auto inner = inside_bounded_store(below))
      below = inner;
    else
      break;
  }
  const auto* tcp = dynamic_cast<const c10d::TCPStore*>(below.get());
  return tcp != nullptr ? std::optional(tcp->getPort()) : std::nullopt;
}

bool has_server_ended(uint16_t port) {
  std::error_code error;
  const std::filesystem::directory_iterator open("/proc/self/fd", error);
  if (error) return false;
  return std::any_of(begin(open), end(open), [port](const auto& entry) {
    const std::string name = entry.path().filename();
    int socket = -1;
    std::from_chars(name.data(), name.data() + name.size(), socket);
    return socket >= 0 && leads_to(socket, port) && is_closed_there(socket);
  });
}

}  // namespace fsdp
