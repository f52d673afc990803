#pragma once

#include "spread_call.hpp"
#include "support/ranks.hpp"

namespace fsdp::test {

/// Runs the operator on this rank's DTensors: it gives and leaves behind what the plain one did, and refuses what that one refused.
/// Returns whether it went without the general rule.
bool compare_call(const Rank& rank, const DeviceMesh& mesh, const SpreadCall& call);

}  // namespace fsdp::test
