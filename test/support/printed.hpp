#pragma once

#include <catch2/catch.hpp>
#include <fmt/format.h>

#include "fsdp/local_ranges.hpp"
#include "fsdp/placement.hpp"
#include "tensor/index_ranges.hpp"

namespace fsdp::test {

/// "[0, 2) [5, 6)"
inline std::string ranges_text(const std::vector<ElementRange>& ranges) {
  std::string text;
  for (const ElementRange& range : ranges) text += fmt::format("[{}, {}) ", range.begin, range.end);
  return text.empty() ? "none" : text;
}

}  // namespace fsdp::test

namespace Catch {

template <>
struct StringMaker<fsdp::Placement> {
  static std::string convert(const fsdp::Placement& placement) { return fsdp::to_string(placement); }
};

// LibTorch's logging header prints any vector, so Catch2 would leave it to that, which stops at elements that
// it cannot print.
template <>
struct StringMaker<std::vector<fsdp::Placement>> {
  static std::string convert(const std::vector<fsdp::Placement>& placements) {
    return fsdp::to_string(placements);
  }
};

template <>
struct StringMaker<fsdp::IndexRanges> {
  static std::string convert(const fsdp::IndexRanges& ranges) { return fsdp::test::ranges_text(ranges); }
};

template <>
struct StringMaker<std::vector<fsdp::IndexRanges>> {
  static std::string convert(const std::vector<fsdp::IndexRanges>& indices) {
    std::string text;
    for (const fsdp::IndexRanges& ranges : indices) text += "{ " + fsdp::test::ranges_text(ranges) + "} ";
    return text;
  }
};

}  // namespace Catch
