#pragma once

// Stands for the one header of Catch2 2, which the tests include, where the library is Catch2 3.

#include <catch2/catch_all.hpp>
#include <string>

namespace Catch {

inline auto Contains(const std::string& part) { return Matchers::ContainsSubstring(part); }
using Matchers::StartsWith;

}  // namespace Catch

using Catch::Approx;
