#pragma once

#include <string>
#include <vector>

namespace fsdp::test {

enum class Exchanges { kAllowed, kRefused };

/// While it lives, what this process brings to the disk and renames below a folder is written down. The functions of
/// the C library that do so are this program's own (recorded_files.cpp). One at a time.
class RecordedFiles {
 public:
  /// kRefused: as on a file system that cannot exchange two folders in one step.
  RecordedFiles(const std::string& root, Exchanges exchanges);
  ~RecordedFiles();
  RecordedFiles(const RecordedFiles&) = delete;
  RecordedFiles& operator=(const RecordedFiles&) = delete;

  /// What had a name of its own before it was on the disk: files that were written after their last sync or never
  /// synced, folders whose entries changed since, and new folders above that their own parents do not show yet.
  std::vector<std::string> named_too_early() const;
  /// "sync c", "rename .c.fsdp-saving-0 c", in their order and below the root, without the tokens of hidden names. Of
  /// files only the renames.
  std::vector<std::string> of_folders() const;
};

}  // namespace fsdp::test
