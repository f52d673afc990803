#pragma once

#include <catch2/catch.hpp>

#include <exception>
#include <string>

namespace fsdp::test {

/// What `body` throws, without the stack that LibTorch appends. For one thread: it asserts that an Expected is thrown.
template <class Expected, class Body>
std::string error_of(Body&& body) {
  try {
    body();
  } catch (const Expected& error) {
    const std::string text = error.what();
    return text.substr(0, text.find("\nException raised from"));
  }
  FAIL("nothing was thrown");
  return {};
}

}  // namespace fsdp::test
