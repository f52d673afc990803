#pragma once

#include <string>
#include <string_view>

namespace fsdp {

/// What a backend's error says, in one line. Where the connection to another rank has ended, what that means comes first, and
/// what the backend advises is left out.
std::string transport_error(std::string_view what);

}  // namespace fsdp
