#include <string_view>

#include "check.hpp"
#include "checkpoint/checkpoint_error.hpp"
#include "checkpoint/format/block_sums.hpp"
#include "checkpoint/format/manifest.hpp"
#include "checkpoint/format/strict_json.hpp"
#include "fsdp/error.hpp"

// fsdp_manifest.json: the bytes are the part that its sum covers, and get their sum here, or no change would get past it.
namespace {

std::string with_sum(std::string_view bytes) {
  const auto body = nlohmann::json::parse(bytes, nullptr, false);
  if (body.is_discarded()) return std::string(bytes);
  try {
    const auto text = fsdp::dump(body, "manifest");
    const auto sum = fmt::format("{:08x}", fsdp::block_sum(std::as_bytes(std::span(text))));
    return fsdp::dump(nlohmann::json{{"crc32c", sum}, {"manifest", body}}, "manifest");
  } catch (const fsdp::UsageError&) {  // no UTF-8
    return std::string(bytes);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t count) {
  try {
    const auto manifest = fsdp::parse_manifest(with_sum({reinterpret_cast<const char*>(bytes), count}), "manifest");
    for (const auto& [name, entry] : manifest.files)
      check(static_cast<int64_t>(entry.sums.size()) == fsdp::blocks_of(entry.bytes), "a file has a sum for each block");
    for (const auto& [section, files] : manifest.sections)
      for (const auto& file : files) check(manifest.files.contains(file), "a section's files are the manifest's");
    for (const auto& document : manifest.documents) check(manifest.files.contains(document), "so are documents");
    const auto text = fsdp::make_manifest(manifest);
    check(fsdp::make_manifest(fsdp::parse_manifest(text, "manifest")) == text, "a manifest is read as it was written");
  } catch (const fsdp::CheckpointError&) {
  }
  return 0;
}
