#pragma once

#include <chrono>
#include <string>
#include <string_view>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "fsdp/error.hpp"

namespace fsdp {

/// Where the ranks of a world find each other.
struct RendezvousOptions {
  std::string init_method = "env://";  ///< env://, tcp://host:port or file:///path
  int rank = 0;
  int world_size = 1;
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
};

/// The error of a call of init_process_group: "init_process_group on rank 1 of 4" + rest.
CommError join_error(const RendezvousOptions& options, std::string_view rest);

struct MeetingPlace {
  c10::intrusive_ptr<c10d::Store> store;
  bool is_loopback = false;  ///< the address says that all ranks are on this machine
};

/// Opens the store and waits until all ranks have. Rank 0 serves it for env:// and tcp://, unless
/// torchrun's agent does already. Keys are this world's own: neither those of an attempt before a
/// restart nor those of an earlier world of this process.
/// Throws UsageError for a malformed init method or a variable that is missing, CommError naming
/// the ranks that did not come in time, or the address where nothing answers. Nor does a call of the store wait for
/// ever later on, when this rank is cut off from it (bounded_store.hpp).
MeetingPlace meet(const RendezvousOptions& options);

}  // namespace fsdp
