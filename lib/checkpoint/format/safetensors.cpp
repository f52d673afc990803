#include "checkpoint/format/safetensors.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

#include "checkpoint/checkpoint_error.hpp"
#include "checkpoint/format/block_sums.hpp"
#include "checkpoint/format/dtype_names.hpp"
#include "checkpoint/format/strict_json.hpp"

namespace fsdp {

namespace {

static_assert(std::endian::native == std::endian::little, "the format is little-endian");

constexpr int64_t kPrefixBytes = 8;
constexpr auto kMetadata = "__metadata__";
// From so much data on it begins at a block: pieces of large tensors are mostly whole blocks then, each read by one
// rank alone. The spaces take a 64th of the file at most.
constexpr int64_t kAlignedDataBytes = 64 * kBlockBytes;
// The file, a tensor, its list of sizes.
constexpr int kHeaderDepth = 3;

SafetensorsEntry parse_entry(const std::string& name, const nlohmann::json& value, int64_t data_bytes,
                             const std::string& file) {
  const auto subject = fmt::format("{}: tensor '{}'", file, name);
  require_checkpoint(value.is_object(), "{}: is not an object", subject);
  for (const auto& item : value.items())
    require_checkpoint(item.key() == "dtype" || item.key() == "shape" || item.key() == "data_offsets",
                       "{}: '{}' is not known to the format", subject, item.key());
  const auto dtype_name = string_at(value, "dtype", subject);
  const auto dtype = dtype_of_safetensors(dtype_name);
  require_checkpoint(dtype.has_value(), "{}: dtype '{}' is not known", subject, dtype_name);
  SafetensorsEntry entry{.name = name, .dtype = *dtype, .sizes = {}};
  for (const auto& size : array_at(value, "shape", subject)) entry.sizes.push_back(whole_number(size, subject, "a size"));
  const auto& offsets = array_at(value, "data_offsets", subject);
  require_checkpoint(offsets.size() == 2, "{}: data_offsets has {} numbers, expected 2", subject, offsets.size());
  const auto begin = whole_number(offsets[0], subject, "an offset"), end = whole_number(offsets[1], subject, "an offset");
  require_checkpoint(begin <= end && end <= data_bytes, "{}: bytes {} to {} are not within the file's {} bytes of data",
                     subject, begin, end, data_bytes);
  entry.offset = begin;
  entry.bytes = checked_bytes(entry.sizes, entry.dtype, subject);
  require_checkpoint(entry.bytes == end - begin, "{}: {} ({}) takes {} bytes, data_offsets gives it {}", subject, dtype_name,
                     fmt::join(entry.sizes, ", "), entry.bytes, end - begin);
  return entry;
}

void require_no_gaps(const std::vector<SafetensorsEntry>& tensors, int64_t data_bytes, const std::string& file) {
  int64_t end = 0;
  for (const auto& tensor : tensors) {
    require_checkpoint(tensor.offset >= end, "{}: tensor '{}' begins at byte {} of the data, within the one before it, "
                       "which ends at {}", file, tensor.name, tensor.offset, end);
    require_checkpoint(tensor.offset == end, "{}: bytes {} to {} of the data, before tensor '{}', belong to no tensor", file,
                       end, tensor.offset, tensor.name);
    end = tensor.offset + tensor.bytes;
  }
  require_checkpoint(end == data_bytes, "{}: the tensors take {} bytes, but the file has {} after its header", file, end,
                     data_bytes);
}

}  // namespace

int64_t checked_numel(std::span<const int64_t> sizes, const std::string& subject) {
  int64_t numel = 1;
  for (const int64_t size : sizes)
    require_checkpoint(size >= 0 && !__builtin_mul_overflow(numel, size, &numel),
                       "{}: sizes ({}) are more elements than 64 bits can count", subject, fmt::join(sizes, ", "));
  return numel;
}

int64_t checked_bytes(std::span<const int64_t> sizes, at::ScalarType dtype, const std::string& subject) {
  int64_t bytes = checked_numel(sizes, subject);
  require_checkpoint(!__builtin_mul_overflow(bytes, static_cast<int64_t>(c10::elementSize(dtype)), &bytes),
                     "{}: sizes ({}) are more bytes than 64 bits can count", subject, fmt::join(sizes, ", "));
  return bytes;
}

SafetensorsHeader parse_safetensors(std::string_view json, int64_t data_bytes, const std::string& file) {
  const auto text = json.substr(0, json.find_last_not_of(' ') + 1);  // much of it may be padding
  const auto value = parse_strict(text, kHeaderDepth, file + ": the header");
  require_checkpoint(value.is_object(), "{}: the header is not an object", file);
  SafetensorsHeader header;
  header.data_begin = kPrefixBytes + static_cast<int64_t>(json.size());
  for (const auto& item : value.items()) {
    if (item.key() != kMetadata) {
      header.tensors.push_back(parse_entry(item.key(), item.value(), data_bytes, file));
      continue;
    }
    require_checkpoint(item.value().is_object(), "{}: {} is not an object", file, kMetadata);
    for (const auto& pair : item.value().items())
      header.metadata[pair.key()] = string_at(item.value(), pair.key().c_str(), file + ": " + kMetadata);
  }
  // Tensors without elements lie at a place too: before the one that begins there.
  std::stable_sort(header.tensors.begin(), header.tensors.end(), [](const auto& a, const auto& b) {
    return std::pair(a.offset, a.bytes) < std::pair(b.offset, b.bytes);
  });
  require_no_gaps(header.tensors, data_bytes, file);
  for (auto& tensor : header.tensors) tensor.offset += header.data_begin;
  return header;
}

SafetensorsHeader read_safetensors(const std::string& path, int64_t file_bytes, const ReadBytes& read) {
  require_checkpoint(file_bytes >= kPrefixBytes, "{}: has {} bytes, too few for a .safetensors file", path, file_bytes);
  uint64_t length = 0;
  read(0, std::as_writable_bytes(std::span(&length, 1)));
  require_checkpoint(length <= static_cast<uint64_t>(std::min(file_bytes - kPrefixBytes, kMaxHeaderBytes)),
                     "{}: its first 8 bytes announce a header of {} bytes, but {} bytes follow them and a header has {} at "
                     "most; this is no .safetensors file, or a part of one",
                     path, length, file_bytes - kPrefixBytes, kMaxHeaderBytes);
  std::string json(length, '\0');
  read(kPrefixBytes, std::as_writable_bytes(std::span(json)));
  return parse_safetensors(json, file_bytes - kPrefixBytes - static_cast<int64_t>(length), path);
}

SafetensorsHeader read_safetensors(const File& file) {
  return read_safetensors(file.path(), file.bytes(),
                          [&](int64_t offset, std::span<std::byte> into) { file.read_at(offset, into); });
}

std::string make_safetensors(std::vector<SafetensorsEntry>& tensors, const std::map<std::string, std::string>& metadata,
                             const std::string& file) {
  nlohmann::ordered_json header;
  if (!metadata.empty()) header[kMetadata] = metadata;
  int64_t end = 0;
  for (auto& tensor : tensors) {
    tensor.offset = end;
    tensor.bytes = checked_bytes(tensor.sizes, tensor.dtype, fmt::format("{}: tensor '{}'", file, tensor.name));
    end += tensor.bytes;
    header[tensor.name] = {{"dtype", safetensors_dtype(tensor.dtype)},
                           {"shape", tensor.sizes},
                           {"data_offsets", {tensor.offset, end}}};
  }
  auto json = header.is_null() ? "{}" : dump(header, file);
  const auto spaces_to = [&](int64_t multiple) {
    const int64_t past = (kPrefixBytes + static_cast<int64_t>(json.size())) % multiple;
    return past == 0 ? 0 : multiple - past;
  };
  json.append(spaces_to(8), ' ');
  if (end >= kAlignedDataBytes && static_cast<int64_t>(json.size()) + kBlockBytes <= kMaxHeaderBytes)
    json.append(spaces_to(kBlockBytes), ' ');
  require_checkpoint(static_cast<int64_t>(json.size()) <= kMaxHeaderBytes,
                     "{}: {} tensors need a header of {} bytes, {} at most; choose smaller files (max_file_bytes)", file,
                     tensors.size(), json.size(), kMaxHeaderBytes);
  std::string bytes(kPrefixBytes, '\0');
  const uint64_t length = json.size();
  std::memcpy(bytes.data(), &length, sizeof length);
  bytes += json;
  for (auto& tensor : tensors) tensor.offset += static_cast<int64_t>(bytes.size());
  return bytes;
}

}  // namespace fsdp
