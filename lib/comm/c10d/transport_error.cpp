#include "comm/c10d/transport_error.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "base/first_line.hpp"

namespace fsdp {

namespace {

// As gloo and the system say it.
constexpr std::array<std::string_view, 5> kEndOfConnection = {"Connection closed by peer", "Connection reset by peer",
                                                              "Broken pipe", "Remote peer closed the connection",
                                                              "Socket closed"};
constexpr std::string_view kSentence = "the connection has ended";
constexpr std::string_view kAdvice = ". This is typically caused by";

}  // namespace

std::string transport_error(std::string_view what) {
  auto line = first_line(what);
  const bool has_ended = std::any_of(kEndOfConnection.begin(), kEndOfConnection.end(),
                                     [&](std::string_view text) { return line.find(text) != std::string::npos; });
  line.resize(std::min(line.find(kAdvice), line.size()));
  if (!has_ended || line.find(kSentence) != std::string::npos) return line;
  return fmt::format("{}: the other rank's process has exited, or has failed; its own log says why ({})", kSentence, line);
}

}  // namespace fsdp
