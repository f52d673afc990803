#pragma once

#include <exception>

namespace fsdp {

/// How an error of the host language, Python's, is kept: thrown from an operator it is the interpreter's current one still,
/// under which no other code of that language may run.
using KeepHostError = void (*)(const std::exception& error);

/// Before the first operator. There is one for the process; null by default.
void set_keep_host_error(KeepHostError keep);

/// In front of anything else that is done before it is thrown on. Nothing for any other error.
void keep_host_error(const std::exception& error);

}  // namespace fsdp
