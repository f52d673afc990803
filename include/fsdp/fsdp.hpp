#pragma once

/// The whole public API of libfsdp.

#include "fsdp/activation_checkpoint.hpp"
#include "fsdp/communicator.hpp"
#include "fsdp/device_mesh.hpp"
#include "fsdp/dtensor.hpp"
#include "fsdp/error.hpp"
#include "fsdp/forward_scope.hpp"
#include "fsdp/fsdp1.hpp"
#include "fsdp/fully_shard.hpp"
#include "fsdp/local_ranges.hpp"
#include "fsdp/parameters.hpp"
#include "fsdp/placement.hpp"
#include "fsdp/policy.hpp"
#include "fsdp/process_group.hpp"
#include "fsdp/schedule_check.hpp"
#include "fsdp/simulated_network.hpp"
#include "fsdp/statistics.hpp"
#include "fsdp/timeline.hpp"
#include "fsdp/wrap_policy.hpp"
