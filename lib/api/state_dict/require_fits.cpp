#include "api/state_dict/require_fits.hpp"

#include <fmt/ranges.h>

#include "base/require.hpp"

namespace fsdp {

namespace {

// No name holds these.
constexpr char kItemEnd = '\x1f', kListEnd = '\x1e';

}  // namespace

void append_list(std::string& text, std::string_view title, const std::vector<std::string>& items) {
  if (!items.empty()) text += fmt::format(" {}: {}.", title, fmt::join(items, ", "));
}

void require_fits(const IncompatibleKeys& result, std::string_view caller, std::string_view subject) {
  if (result.empty()) return;
  std::string text;
  append_list(text, "Missing", result.missing);
  append_list(text, "Unexpected", result.unexpected);
  append_list(text, "Wrong", result.wrong);
  throw UsageError(fmt::format(
      "{}: the dict does not fit the {}; nothing was changed.{} Set strict to false to load what fits",
      caller, subject, text));
}

std::string pack(const std::vector<std::vector<std::string>>& lists) {
  std::string text;
  for (const auto& items : lists) {
    for (const auto& item : items) text += item + kItemEnd;
    text += kListEnd;
  }
  return text;
}

std::vector<std::vector<std::string>> unpack(const std::string& text) {
  std::vector<std::vector<std::string>> lists;
  std::vector<std::string> items;
  std::string item;
  for (const char c : text) {
    if (c == kItemEnd) {
      items.push_back(std::exchange(item, {}));
    } else if (c == kListEnd) {
      lists.push_back(std::exchange(items, {}));
    } else {
      item += c;
    }
  }
  return lists;
}

}  // namespace fsdp
