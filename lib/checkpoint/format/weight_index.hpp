#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

namespace fsdp {

/// Which file has which tensor: `model.safetensors.index.json` of Hugging Face's tools.
struct WeightIndex {
  int64_t total_bytes = 0;                      ///< of all tensors
  std::map<std::string, std::string> files = {};  ///< by tensor
};

std::string make_weight_index(const WeightIndex& index, const std::string& file);
/// Reads an index that nobody vouches for: file names are plain names that end in .safetensors. Throws CheckpointError
/// naming `file`.
WeightIndex parse_weight_index(std::string_view json, const std::string& file);

}  // namespace fsdp
