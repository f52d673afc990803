#pragma once

#include <catch2/catch.hpp>

#include "fsdp/placement.hpp"

namespace Catch {

template <>
struct StringMaker<fsdp::Placement> {
  static std::string convert(const fsdp::Placement& placement) { return fsdp::to_string(placement); }
};

// LibTorch's logging header prints any vector, so Catch2 would leave it to that, which stops at variants.
template <>
struct StringMaker<std::vector<fsdp::Placement>> {
  static std::string convert(const std::vector<fsdp::Placement>& placements) {
    return fsdp::to_string(placements);
  }
};

}  // namespace Catch
