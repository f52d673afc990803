#pragma once

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/io/file.hpp"

// The header of a .safetensors file: 8 bytes with the length of the JSON that follows, little-endian; then the data.
namespace fsdp {

/// One tensor of a file.
struct SafetensorsEntry {
  std::string name;
  at::ScalarType dtype;
  std::vector<int64_t> sizes;
  int64_t offset = 0;  ///< of its first byte, from the beginning of the file
  int64_t bytes = 0;
};

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> tensors = {};  ///< in the order of their data
  std::map<std::string, std::string> metadata = {};
  int64_t data_begin = 0;  ///< from the beginning of the file
};

/// The longest header that is read, as in the reference implementation: a longer one is no header.
inline constexpr int64_t kMaxHeaderBytes = 100'000'000;

/// Returns the number of elements of a tensor of these sizes, or with a dtype its bytes. Throws CheckpointError, beginning with
/// `subject`, where the product does not fit into 63 bits.
int64_t checked_numel(std::span<const int64_t> sizes, const std::string& subject);
int64_t checked_bytes(std::span<const int64_t> sizes, at::ScalarType dtype, const std::string& subject);

/// Reads a header that nobody vouches for. `data_bytes`: what the file has behind it; tensors must fill it exactly,
/// without gaps or overlaps, as the format demands.
/// Throws CheckpointError naming `file` and the tensor.
SafetensorsHeader parse_safetensors(std::string_view json, int64_t data_bytes, const std::string& file);
/// Reads from `offset` of a file into memory.
using ReadBytes = std::function<void(int64_t offset, std::span<std::byte> into)>;
/// Reads the header of a file and parses it as parse_safetensors does; nothing else of the file is read. path: for messages.
SafetensorsHeader read_safetensors(const std::string& path, int64_t file_bytes, const ReadBytes& read);
SafetensorsHeader read_safetensors(const File& file);

/// The bytes before the data: length and JSON, padded with spaces so that the data begins at a multiple of 8, and from
/// 64 MiB of data on at a multiple of 1 MiB.
/// Sets `offset` and `bytes` of the tensors, whose order is that of their data.
std::string make_safetensors(std::vector<SafetensorsEntry>& tensors, const std::map<std::string, std::string>& metadata,
                             const std::string& file);

}  // namespace fsdp
