#pragma once

#include <string>
#include <string_view>

namespace fsdp {

/// c10's messages carry a C++ backtrace behind their first line, and gloo's begin with a place in its sources, such as
/// "[../pair.cc:78] ". Neither is for those who read ours.
inline std::string first_line(std::string_view text) {
  text = text.substr(0, text.find('\n'));
  const auto place_end = text.starts_with('[') ? text.find("] ") : std::string_view::npos;
  if (place_end != std::string_view::npos && text.substr(0, place_end).find(".cc:") != std::string_view::npos)
    text.remove_prefix(place_end + 2);
  return std::string(text);
}

}  // namespace fsdp
