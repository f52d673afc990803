#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <map>
#include <string>

namespace fsdp::test {

/// Operators that are not compared, by base name, and why not.
const std::map<std::string, std::string>& excluded();

/// empty_like and its like: what the result's memory holds is not said.
bool leaves_values_open(const c10::OperatorHandle& op);
/// Says it may return a view, but of a DTensor it returns an ordinary tensor or a copy.
bool shows_no_memory(const c10::OperatorHandle& op);
bool is_written_result(const c10::OperatorHandle& op, size_t tensor);
/// It takes its random numbers from the generator that ranks that are threads share, and may gather meanwhile.
bool needs_one_rank(const c10::OperatorHandle& op);
/// Overloads that are not drawn although the operator is compared.
bool is_skipped(const c10::OperatorHandle& op);

}  // namespace fsdp::test
