#include "checkpoint/format/weight_index.hpp"

#include "checkpoint/checkpoint_error.hpp"
#include "checkpoint/format/strict_json.hpp"

namespace fsdp {

namespace {

// Tools may keep more in the index's metadata; no tool nests deeply.
constexpr int kIndexDepth = 8;
constexpr std::string_view kEnding = ".safetensors";

}  // namespace

std::string make_weight_index(const WeightIndex& index, const std::string& file) {
  nlohmann::ordered_json value;
  value["metadata"]["total_size"] = index.total_bytes;
  value["weight_map"] = nlohmann::ordered_json::object();
  for (const auto& [tensor, name] : index.files) value["weight_map"][tensor] = name;
  return dump(value, file);
}

WeightIndex parse_weight_index(std::string_view json, const std::string& file) {
  const auto value = parse_strict(json, kIndexDepth, file);
  require_checkpoint(value.is_object(), "{}: is not an object", file);
  WeightIndex index;
  // Some tools leave it out, or write it as a floating-point number: nothing is decided by it.
  if (const auto metadata = value.find("metadata"); metadata != value.end() && metadata->is_object())
    if (const auto total = metadata->find("total_size"); total != metadata->end() && total->is_number_unsigned())
      index.total_bytes = whole_number(*total, file, "total_size");
  const auto& map = object_at(value, "weight_map", file);
  for (const auto& item : map.items()) {
    auto name = string_at(map, item.key().c_str(), file);
    require_checkpoint(name.find('/') == std::string::npos && name.find('\\') == std::string::npos &&
                           name.find('\0') == std::string::npos && name.size() > kEnding.size() &&
                           name.ends_with(kEnding) && name.front() != '.',
                       "{}: tensor '{}' is said to be in '{}', which is not the plain name of a .safetensors file", file,
                       item.key(), name);
    index.files[item.key()] = std::move(name);
  }
  return index;
}

}  // namespace fsdp
