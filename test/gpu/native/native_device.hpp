#pragma once

#include <functional>

// What needs CUDA's own calls. In a library of its own, as a program would have to be linked with CUDA's, too.
namespace fsdp::test {

/// Queues about so many milliseconds of work on the device's current stream, which does nothing. Without CUDA: nothing.
void spin(double ms);

/// Runs `step` three times on a stream of its own, and once more as it is captured in a graph; what is returned replays
/// that. Without CUDA it is empty.
std::function<void()> captured(const std::function<void()>& step);

}  // namespace fsdp::test
