#pragma once

#include "fsdp/communicator.hpp"

namespace fsdp {

/// A world of one rank whose tensors live on `device_type` by default; either kind of tensor works.
std::shared_ptr<Communicator> single_rank_on(c10::DeviceType device_type);

}  // namespace fsdp
