#pragma once

#include <map>
#include <string>
#include <vector>

#include "comm/nccl/nccl_api.hpp"

namespace fsdp::test {

/// One collective as one rank asked for it.
struct NcclCall {
  const char* name;
  const void* input;
  void* output;
  size_t count;
  ncclDataType_t dtype;
  ncclRedOp_t op = ncclSum;
  int root = 0;
  double scale = 1;  // of a pre-multiplied sum, or an average
  int window = 0;    // in which the buffer of all ranks lies; 0: in none
  size_t window_offset = 0;
};

/// Where windows count: what a gather writes, what a reduction reads.
const void* buffer_of_all(const NcclCall& call);

/// What must be the same on all ranks: "all_gather of 12 x dtype 1, ...".
std::string signature(const std::vector<NcclCall>& calls);

/// Moves and adds up what a launch of all ranks asks for. A sum is taken in the order of the ranks.
void run_collectives(const std::map<int, std::vector<NcclCall>>& by_rank);

/// A factor as NCCL reads it.
double scalar_value(const void* scalar, ncclDataType_t dtype);
/// As a value of that dtype.
double scalar_in(double value, ncclDataType_t dtype);

}  // namespace fsdp::test
