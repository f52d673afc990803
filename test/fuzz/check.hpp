#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>

/// Ends the program, which a fuzzer takes for a finding.
inline void check(bool holds, const char* rule) {
  if (holds) return;
  std::fprintf(stderr, "broken: %s\n", rule);
  std::abort();
}
