#pragma once

#include <string>

namespace fsdp::python {

/// A message of the core in Python's notation: `fsdp::materialize` is `fsdp.materialize`, and what C++ alone has makes way for
/// what a Python program does in its place.
std::string in_python_words(std::string text);

}  // namespace fsdp::python
