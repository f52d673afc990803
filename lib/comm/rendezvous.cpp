#include "comm/rendezvous.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <atomic>
#include <charconv>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "base/environment.hpp"
#include "base/first_line.hpp"
#include "base/require.hpp"
#include "comm/bounded_calls.hpp"
#include "comm/bounded_store.hpp"
#include "comm/reachable.hpp"

namespace fsdp {
namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

struct Address {
  std::string host;
  int port = 0;
  bool served_by_agent = false;
};

Address address_from_environment(const environment::Rendezvous& found) {
  require(found.master_addr && found.master_port,
          "init_process_group: env:// needs MASTER_ADDR and MASTER_PORT, found {}; start with "
          "torchrun, set both, or pass init_method tcp://host:port or file:///path",
          found.master_addr   ? "no MASTER_PORT"
          : found.master_port ? "no MASTER_ADDR"
                              : "neither");
  return {*found.master_addr, *found.master_port, found.agent_hosts_store};
}

Address address_from_url(const std::string& url) {
  const std::string rest = url.substr(std::string_view("tcp://").size());
  const size_t colon = rest.rfind(':');
  Address address;
  if (colon != std::string::npos) {
    address.host = rest.substr(0, colon);
    const char* end = rest.data() + rest.size();
    const auto [stop, error] = std::from_chars(rest.data() + colon + 1, end, address.port);
    if (error != std::errc() || stop != end) address.port = 0;
  }
  require(!address.host.empty() && address.port > 0 && address.port <= 65535,
          "init_process_group: expected init_method tcp://host:port, found '{}'", url);
  return address;
}

bool is_loopback(const std::string& host) {
  return host == "localhost" || host == "::1" || host.starts_with("127.");
}

StorePtr open_tcp(const Address& address, const RendezvousOptions& options) {
  c10d::TCPStoreOptions tcp;
  tcp.port = static_cast<uint16_t>(address.port);
  tcp.isServer = options.rank == 0 && !address.served_by_agent;
  tcp.numWorkers = options.world_size;
  tcp.waitWorkers = false;  // await_ranks does, and can say who is missing
  tcp.timeout = options.timeout;
  tcp.multiTenant = true;  // a world that was destroyed may still have groups in use
  // What accepts the connection may never say a word on it, and a name may take for ever to be looked up.
  const auto open = [address, tcp, options]() -> StorePtr {
    if (!tcp.isServer)
      if (const auto why = why_unreachable(address.host, address.port, options.timeout); !why.empty())
        throw join_error(options, fmt::format(": nothing could be reached at {}:{} within {} ms: {}; {} serves the rendezvous "
                                              "there",
                                              address.host, address.port, options.timeout.count(), why,
                                              address.served_by_agent ? "torchrun" : "rank 0"));
    return c10::make_intrusive<c10d::TCPStore>(address.host, tcp);
  };
  return BoundedCalls(fmt::format("what accepts connections at {}:{}", address.host, address.port))
      .within(options.timeout + kStoreAnswersWithin, open);
}

StorePtr open_file(const std::string& url, const RendezvousOptions& options) {
  std::string path = url.substr(std::string_view("file://").size());
  require(path.starts_with('/'),
          "init_process_group: expected init_method file:///path, found '{}'", url);
  return c10::make_intrusive<c10d::FileStore>(path, options.world_size);
}

void await_ranks(c10d::Store& store, const RendezvousOptions& options) {
  const auto key = [](int rank) { return fmt::format("rank_{}", rank); };
  store.set(key(options.rank), std::vector<uint8_t>{1});
  std::vector<std::string> keys;
  for (int rank = 0; rank < options.world_size; ++rank) keys.push_back(key(rank));
  try {
    store.wait(keys, options.timeout);
  } catch (const NoAnswer&) {
    throw;
  } catch (const std::exception&) {
    std::vector<int> missing;
    for (int rank = 0; rank < options.world_size; ++rank)
      if (!store.check({key(rank)})) missing.push_back(rank);
    if (missing.empty()) return;
    throw join_error(options, fmt::format(": no sign of rank(s) {} at {} within {} ms", fmt::join(missing, ", "),
                                          options.init_method, options.timeout.count()));
  }
}

}  // namespace

CommError join_error(const RendezvousOptions& options, std::string_view rest) {
  return CommError(fmt::format("init_process_group on rank {} of {}{}", options.rank, options.world_size, rest),
                   {.operation = "init_process_group", .group = "world", .rank = options.rank, .size = options.world_size});
}

MeetingPlace meet(const RendezvousOptions& options) {
  const std::string& url = options.init_method;
  const bool is_env = url == "env://";
  const bool is_tcp = url.starts_with("tcp://");
  require(is_env || is_tcp || url.starts_with("file://"),
          "init_process_group: expected init_method env://, tcp://host:port or file:///path, found "
          "'{}'",
          url);
  const environment::Rendezvous found = environment::rendezvous();
  static std::atomic<int> worlds = 0;
  const std::string prefix = fmt::format("fsdp/attempt_{}/world_{}", found.restart_count, worlds++);
  MeetingPlace place;
  try {
    if (is_env || is_tcp) {
      const Address address = is_env ? address_from_environment(found) : address_from_url(url);
      place.is_loopback = is_loopback(address.host);
      place.store = open_tcp(address, options);
    } else {
      place.store = open_file(url, options);
    }
    place.store->setTimeout(options.timeout);
    // A call may queue behind one of another thread that waits for a key, on the one connection that they share.
    const auto answers_within = std::max(options.timeout, kStoreAnswersWithin);
    place.store = c10::make_intrusive<c10d::PrefixStore>(prefix, bounded_store(place.store, answers_within));
    await_ranks(*place.store, options);
  } catch (const NoAnswer& error) {
    throw join_error(options, fmt::format(" at {}: {}", url, error.what()));
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    throw join_error(options, fmt::format(" at {}: {}", url, first_line(error.what())));
  }
  return place;
}

}  // namespace fsdp
