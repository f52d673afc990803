#pragma once

#include <string>

#include "fsdp/schedule_check_options.hpp"

namespace fsdp {

/// What the ranks of a root disagree about, as it travels between them and is thrown on each.
struct Verdict {
  std::string text;
  ScheduleDifference difference = {};

  /// Writes the verdict as one text, for the board.
  std::string encode() const;
  /// Reads a verdict from its text. A text that `encode` did not make is the verdict's own.
  static Verdict decode(const std::string& encoded);
};

}  // namespace fsdp
