#pragma once

#include <string>

#include "execution.hpp"

namespace llama {

struct Sample {
  std::string prompt, continuation;
};

/// Continues a line from the middle of `text`, one byte at a time, by all ranks together; the same
/// text on every rank.
Sample generate(Execution& execution, const ModelConfig& model, const std::string& text,
                const OutputOptions& options, uint64_t seed);

/// `text` as a terminal can show it: control bytes and broken UTF-8 become '?'.
std::string printable(const std::string& text);

}  // namespace llama
