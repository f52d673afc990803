#pragma once

#include <exception>

namespace fsdp {

/// How an error of the host language, Python's, is kept: thrown from an operator it is the interpreter's current one still,
/// under which no other code of that language may run.
using KeepHostError = void (*)(const std::exception& error);

/// Sets the process's one KeepHostError; null, as by default: none. Call it before the first operator.
void set_keep_host_error(KeepHostError keep);

/// Keeps an error of the host language, and does nothing for any other. Call it in front of anything else that is done before
/// the error is thrown on.
void keep_host_error(const std::exception& error);

}  // namespace fsdp
