#pragma once

#include <catch2/catch.hpp>

#include <string>

namespace fsdp::test {

/// Before the `return` of a case that this machine cannot run: tools/test counts it as skipped, not as passed.
inline void skip(const std::string& why) { WARN("skipped: " + why); }

}  // namespace fsdp::test
