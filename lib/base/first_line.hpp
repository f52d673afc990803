#pragma once

#include <string>
#include <string_view>

namespace fsdp {

/// c10's messages carry a C++ backtrace behind their first line, which is for nobody who reads ours.
inline std::string first_line(std::string_view text) { return std::string(text.substr(0, text.find('\n'))); }

}  // namespace fsdp
