#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/plan/file_plan.hpp"

namespace fsdp {

/// An index or a manifest is read as a whole: more than any that a real model has.
inline constexpr int64_t kMaxTextBytes = int64_t{1} << 30;

/// What a checkpoint holds and where, whoever wrote it: one rank reads it from the files and tells the others.
struct Catalogue {
  struct DataFile {
    std::string name;
    int64_t bytes = 0;
    std::optional<std::vector<uint32_t>> sums = {};  ///< of its blocks; none for files from elsewhere
  };
  struct TensorEntry {
    std::string name;
    at::ScalarType dtype;
    std::vector<int64_t> sizes;
    FilePlace place = {};
  };
  struct Section {
    std::vector<TensorEntry> tensors = {};
    std::map<std::string, std::string> other_names = {};  ///< each with the one that its tensor is saved under
  };

  std::string folder;
  int world_size = 0;  ///< 0: not known
  std::vector<DataFile> files = {};
  std::map<std::string, Section> sections = {};
  std::map<std::string, std::string> documents = {};
};

/// Reads manifest, indexes, headers and documents of a folder, or the header of one file. Throws CheckpointError.
Catalogue read_catalogue(const std::string& path, bool verifies, bool follow_symlinks);

/// Turns the catalogue into text and back, for the way between ranks.
std::string to_text(const Catalogue& catalogue);
Catalogue catalogue_from(const std::string& text);

}  // namespace fsdp
