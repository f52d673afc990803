#pragma once

#include <memory>

#include "fsdp/communicator.hpp"

namespace fsdp {

/// `group`, or with FSDP_FAKE_ALL_GATHER or FSDP_FAKE_REDUCE set a group of the same ranks
/// that leaves out its all-gathers, or its reduce-scatters and all-reduces: they return at once with
/// this rank's own bytes, and the others' are whatever the buffer held. Says so once in the log.
std::shared_ptr<Communicator> with_fake_collectives(std::shared_ptr<Communicator> group);

}  // namespace fsdp
