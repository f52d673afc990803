#pragma once

#include <string>
#include <vector>

#include "support/twin.hpp"

namespace fsdp::test {

/// Of a parameter as the module's member holds it.
GradientDtypes gradient_dtypes(const Workload& workload, const Training& training, const at::Tensor& parameter);

/// The distance of 1 to the next larger number.
double segment_of(at::ScalarType dtype);

// What a sharded model has on this rank is compared with the plain model's whole tensors. Where both round, the sharded model
// goes on with the plain one's numbers.

/// Before clipping.
void compare_gradients(const Rank& rank, const Workload& workload, const Training& training,
                       const NamedTensors& parameters, const PlainRecord::Step& expected, int step);

void compare_weights(const Rank& rank, const Workload& workload, const Training& training,
                     const NamedTensors& parameters, const NamedTensors& expected, double tolerance,
                     const std::string& when);

/// What the code keeps is this rank's part where it is spread like its parameter, else the whole.
void compare_kept(const Rank& rank, const Workload& workload, const NamedTensors& parameters,
                  const std::vector<TrainingCode::Kept>& found, const PlainRecord::Step& expected, int step);

/// The same by fsdp::full_tensor, where the whole is what the plain model has. Collective.
void compare_whole(const Rank& rank, const std::vector<TrainingCode::Kept>& found, const PlainRecord::Step& expected);

}  // namespace fsdp::test
