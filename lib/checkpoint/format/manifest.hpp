#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace fsdp {

inline constexpr auto kManifestFile = "fsdp_manifest.json";

/// fsdp_manifest.json: what a checkpoint of ours consists of. A folder without it is not one.
struct Manifest {
  struct FileEntry {
    int64_t bytes = 0;
    std::vector<uint32_t> sums = {};  ///< of each block; see block_sums.hpp
  };
  int world_size = 0;
  std::map<std::string, FileEntry> files = {};
  std::map<std::string, std::vector<std::string>> sections = {};  ///< .safetensors files
  std::vector<std::string> documents = {};
};

/// Writes the manifest as JSON, with a sum of its own, so that a damaged manifest is not taken for damaged files.
std::string make_manifest(const Manifest& manifest);
/// Throws CheckpointError naming `file`.
Manifest parse_manifest(std::string_view json, const std::string& file);

}  // namespace fsdp
