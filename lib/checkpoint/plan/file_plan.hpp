#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "checkpoint/format/safetensors.hpp"

namespace fsdp {

/// A tensor as all ranks know it.
struct TensorDescription {
  std::string name;
  at::ScalarType dtype;
  std::vector<int64_t> sizes;
  bool is_sharded = false;
  std::vector<std::string> other_names = {};
  bool operator==(const TensorDescription&) const = default;
};

struct SectionDescription {
  std::string name;
  std::vector<TensorDescription> tensors = {};
};

/// Where a tensor's data lies.
struct FilePlace {
  size_t file = 0;
  int64_t offset = 0;  ///< bytes
  int64_t bytes = 0;
};

struct PlannedFile {
  std::string name;
  std::string header;  ///< all before the data but for the spaces at its end, which may be a MiB
  int64_t header_bytes = 0;  ///< with them
  int64_t bytes = 0;
};

struct FilePlan {
  std::vector<PlannedFile> files;
  std::vector<std::vector<FilePlace>> places;          ///< by section and tensor
  std::map<std::string, std::vector<std::string>> sections;  ///< file names
  std::map<std::string, std::string> indexes;          ///< text by file name
};

/// The metadata entry of a .safetensors file with the further names of its tensors, as a JSON object.
inline constexpr auto kOtherNames = "fsdp.other_names";

std::string index_file_of(const std::string& section);

/// Fills files in the order of the tensors, each up to `max_file_bytes` of data. Within a file the tensors of wide
/// dtypes come first, so that each lies at a multiple of its element. The same for the same input.
/// Throws UsageError for repeated or forbidden names.
FilePlan plan_files(const std::vector<SectionDescription>& sections, int64_t max_file_bytes);

}  // namespace fsdp
