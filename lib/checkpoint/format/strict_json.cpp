#include "checkpoint/format/strict_json.hpp"

#include <limits>
#include <unordered_set>
#include <vector>

#include "base/require.hpp"
#include "checkpoint/checkpoint_error.hpp"

namespace fsdp {

namespace {

using nlohmann::json;

/// Watches the parser. It keeps its own place, since the parser recurses for nothing.
class Watcher {
 public:
  Watcher(int max_depth, const std::string& subject) : max_depth_(max_depth), subject_(subject) {}

  bool operator()(int /*depth*/, json::parse_event_t event, json& value) {
    switch (event) {
      case json::parse_event_t::object_start:
      case json::parse_event_t::array_start:
        keys_.emplace_back();
        require_checkpoint(keys_.size() <= max_depth_, "{}: values are nested deeper than the {} levels that the format has",
                           subject_, max_depth_);
        break;
      case json::parse_event_t::object_end:
      case json::parse_event_t::array_end:
        keys_.pop_back();
        break;
      case json::parse_event_t::key: {
        const auto& key = value.get_ref<const std::string&>();
        require_checkpoint(keys_.back().insert(key).second, "{}: the key '{}' is there twice", subject_, key);
        break;
      }
      case json::parse_event_t::value:
        break;
    }
    return true;
  }

 private:
  size_t max_depth_;
  const std::string& subject_;
  std::vector<std::unordered_set<std::string>> keys_;  // of the values that are open
};

const json& member(const json& object, const char* key, const std::string& subject) {
  const auto found = object.find(key);
  require_checkpoint(found != object.end(), "{}: there is no '{}'", subject, key);
  return *found;
}

template <class Json>
std::string dumped(const Json& value, const std::string& subject) {
  try {
    return value.dump();
  } catch (const json::type_error&) {
    throw UsageError(subject + ": a name or text is not valid UTF-8, which JSON needs");
  }
}

}  // namespace

json parse_strict(std::string_view text, int max_depth, const std::string& subject) {
  try {
    Watcher watcher(max_depth, subject);
    return json::parse(text.begin(), text.end(), std::ref(watcher));
  } catch (const json::exception& error) {
    throw CheckpointError(fmt::format("{}: is not JSON: {}", subject, error.what()));
  }
}

const json& object_at(const json& object, const char* key, const std::string& subject) {
  const auto& value = member(object, key, subject);
  require_checkpoint(value.is_object(), "{}: '{}' is not an object", subject, key);
  return value;
}

const json& array_at(const json& object, const char* key, const std::string& subject) {
  const auto& value = member(object, key, subject);
  require_checkpoint(value.is_array(), "{}: '{}' is not an array", subject, key);
  return value;
}

std::string string_at(const json& object, const char* key, const std::string& subject) {
  const auto& value = member(object, key, subject);
  require_checkpoint(value.is_string(), "{}: '{}' is not a string", subject, key);
  return value.get<std::string>();
}

int64_t number_at(const json& object, const char* key, const std::string& subject) {
  return whole_number(member(object, key, subject), subject, key);
}

int64_t whole_number(const json& value, const std::string& subject, std::string_view what) {
  // Larger numbers than 64 bits hold are floating-point ones here, negative ones are signed.
  require_checkpoint(value.is_number_unsigned() &&
                         value.get<uint64_t>() <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max()),
                     "{}: {} is not a whole number from 0 to 2^63 - 1", subject, what);
  return value.get<int64_t>();
}

std::string dump(const nlohmann::ordered_json& value, const std::string& subject) { return dumped(value, subject); }
std::string dump(const json& value, const std::string& subject) { return dumped(value, subject); }

}  // namespace fsdp
