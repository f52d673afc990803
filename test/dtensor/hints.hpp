#pragma once

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>

#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "support/draw.hpp"

namespace fsdp::test {

/// What an operator needs its operands to be: "input=NxCx5 weight=CxC stride=1,2", see hints.cpp. One of several, drawn.
std::optional<std::string_view> hint_for(Draw& draw, std::string_view base_name, std::string_view overload);

/// One call's operands as its hint says.
class Hint {
 public:
  Hint(Draw& draw, std::string_view text);
  /// None: nothing is said of this argument.
  std::optional<c10::IValue> value(const std::string& argument, const c10::TypePtr& type);

 private:
  int64_t number(std::string_view text);
  std::vector<int64_t> numbers(std::string_view text, char between);
  at::Tensor tensor(std::string_view text);
  c10::IValue parsed(std::string_view text, const c10::TypePtr& type);

  Draw& draw_;
  std::map<std::string, std::string, std::less<>> texts_;
  std::map<char, int64_t> letters_;
};

}  // namespace fsdp::test
