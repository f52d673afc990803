#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cstdint>
#include <optional>

namespace fsdp {

/// Returns where the server of a TCP store listens, below prefixes and bounds; nullopt for another store.
std::optional<uint16_t> server_port_of(const c10::intrusive_ptr<c10d::Store>& store);

/// True if what listened on this port has closed a connection of this process: it has ended, most often because the program is
/// over there. c10d finds out when it asks, and writes its stack into the log.
bool has_server_ended(uint16_t port);

}  // namespace fsdp
