#include "checkpoint/format/manifest.hpp"

#include <charconv>
#include <limits>

#include "checkpoint/checkpoint_error.hpp"
#include "checkpoint/format/block_sums.hpp"
#include "checkpoint/format/strict_json.hpp"

namespace fsdp {

namespace {

using nlohmann::json;

constexpr int kVersion = 1;
constexpr int kManifestDepth = 5;
constexpr size_t kSumDigits = 8;

std::string to_hex(const std::vector<uint32_t>& sums) {
  std::string text;
  for (const uint32_t sum : sums) text += fmt::format("{:08x}", sum);
  return text;
}

std::vector<uint32_t> from_hex(const std::string& text, const std::string& subject) {
  require_checkpoint(text.size() % kSumDigits == 0, "{}: its list of checksums is cut off", subject);
  std::vector<uint32_t> sums(text.size() / kSumDigits);
  for (size_t i = 0; i < sums.size(); ++i) {
    const char* begin = text.data() + i * kSumDigits;
    const auto [end, error] = std::from_chars(begin, begin + kSumDigits, sums[i], 16);
    require_checkpoint(error == std::errc() && end == begin + kSumDigits, "{}: its checksums are not hexadecimal", subject);
  }
  return sums;
}

std::string sum_of(const json& body, const std::string& file) {
  const auto text = dump(body, file);
  return fmt::format("{:08x}", block_sum(std::as_bytes(std::span(text))));
}

std::vector<std::string> names_at(const json& object, const char* key, const Manifest& manifest, const std::string& file) {
  std::vector<std::string> names;
  for (const auto& name : array_at(object, key, file)) {
    require_checkpoint(name.is_string() && manifest.files.contains(name.get<std::string>()),
                       "{}: '{}' lists a file that 'files' does not have", file, key);
    names.push_back(name.get<std::string>());
  }
  return names;
}

}  // namespace

std::string make_manifest(const Manifest& manifest) {
  json body;
  body["format"] = "fsdp-checkpoint";
  body["version"] = kVersion;
  body["world_size"] = manifest.world_size;
  body["block_bytes"] = kBlockBytes;
  body["block_sum"] = "crc32c";
  body["documents"] = manifest.documents;
  body["sections"] = json::object();
  for (const auto& [section, files] : manifest.sections) body["sections"][section] = files;
  body["files"] = json::object();
  for (const auto& [name, entry] : manifest.files)
    body["files"][name] = {{"bytes", entry.bytes}, {"sums", to_hex(entry.sums)}};
  return dump(json{{"crc32c", sum_of(body, kManifestFile)}, {"manifest", body}}, kManifestFile) + "\n";
}

Manifest parse_manifest(std::string_view text, const std::string& file) {
  const auto value = parse_strict(text, kManifestDepth, file);
  require_checkpoint(value.is_object(), "{}: is not an object", file);
  const auto& body = object_at(value, "manifest", file);
  require_checkpoint(string_at(value, "crc32c", file) == sum_of(body, file),
                     "{}: is damaged: its contents do not match its checksum", file);
  require_checkpoint(string_at(body, "format", file) == "fsdp-checkpoint",
                     "{}: expected the format 'fsdp-checkpoint', found another", file);
  const auto version = number_at(body, "version", file);
  require_checkpoint(version == kVersion, "{}: has version {} of the format, but this version of libfsdp reads version {}",
                     file, version, kVersion);
  require_checkpoint(number_at(body, "block_bytes", file) == kBlockBytes && string_at(body, "block_sum", file) == "crc32c",
                     "{}: expected crc32c checksums of blocks of {} bytes, found others", file, kBlockBytes);
  Manifest manifest;
  const auto world_size = number_at(body, "world_size", file);
  require_checkpoint(world_size <= std::numeric_limits<int>::max(), "{}: a world_size of {} is too large", file, world_size);
  manifest.world_size = static_cast<int>(world_size);
  const auto& files = object_at(body, "files", file);
  for (const auto& item : files.items()) {
    const auto subject = fmt::format("{}: file '{}'", file, item.key());
    require_checkpoint(item.value().is_object(), "{}: is not an object", subject);
    Manifest::FileEntry entry{number_at(item.value(), "bytes", subject),
                              from_hex(string_at(item.value(), "sums", subject), subject)};
    require_checkpoint(static_cast<int64_t>(entry.sums.size()) == blocks_of(entry.bytes),
                       "{}: has {} bytes, but {} checksums", subject, entry.bytes, entry.sums.size());
    manifest.files[item.key()] = std::move(entry);
  }
  const auto& sections = object_at(body, "sections", file);
  for (const auto& item : sections.items())
    manifest.sections[item.key()] = names_at(sections, item.key().c_str(), manifest, file);
  manifest.documents = names_at(body, "documents", manifest, file);
  return manifest;
}

}  // namespace fsdp
