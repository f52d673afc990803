#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "fsdp/state_dict.hpp"

namespace fsdp {

/// Throws the one UsageError that names everything that does not fit, if anything does not.
void require_fits(const IncompatibleKeys& result, std::string_view caller, std::string_view subject);

/// " title: item, item." to the end of `text`; nothing where there are no items.
void append_list(std::string& text, std::string_view title, const std::vector<std::string>& items);

/// Lists of texts in one text, for the way between ranks.
std::string pack(const std::vector<std::vector<std::string>>& lists);
std::vector<std::vector<std::string>> unpack(const std::string& text);

}  // namespace fsdp
