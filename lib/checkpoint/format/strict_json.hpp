#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace fsdp {

/// Parses text that nobody vouches for. Throws CheckpointError, beginning with `subject`, for what is not JSON,
/// for values nested deeper than `max_depth` (1: an object of plain values) and for a key that an object has twice,
/// of which readers would see one or the other. The memory it takes is a constant times the text.
nlohmann::json parse_strict(std::string_view text, int max_depth, const std::string& subject);

/// The member `key`, of the kind asked for. Throw CheckpointError, beginning with `subject`, where there is none.
const nlohmann::json& object_at(const nlohmann::json& object, const char* key, const std::string& subject);
const nlohmann::json& array_at(const nlohmann::json& object, const char* key, const std::string& subject);
std::string string_at(const nlohmann::json& object, const char* key, const std::string& subject);
/// A whole number from 0 to the largest int64_t.
int64_t number_at(const nlohmann::json& object, const char* key, const std::string& subject);
/// Returns the number that `value` is, as number_at does for a member; `what` names it in errors.
int64_t whole_number(const nlohmann::json& value, const std::string& subject, std::string_view what);

/// The text of `value`. Throws UsageError, beginning with `subject`, for a string that is not UTF-8.
std::string dump(const nlohmann::ordered_json& value, const std::string& subject);
std::string dump(const nlohmann::json& value, const std::string& subject);

}  // namespace fsdp
