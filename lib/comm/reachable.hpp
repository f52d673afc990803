#pragma once

#include <chrono>
#include <string>

namespace fsdp {

/// Waits until something accepts connections at this address. Empty if it does; else, after `timeout`, why the last try
/// failed. (c10d's own client shows a failed connection with the frames of its stack, several times.)
std::string why_unreachable(const std::string& host, int port, std::chrono::milliseconds timeout);

}  // namespace fsdp
