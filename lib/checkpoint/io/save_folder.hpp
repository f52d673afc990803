#pragma once

#include <optional>
#include <set>
#include <string>
#include <vector>

#include "checkpoint/io/file.hpp"

// Note [Steps of a save]
// Beside the folder `NAME` that is saved, hidden ones show what a save was doing when it was killed:
//   .NAME.fsdp-saving-TOKEN   is being written; after the exchange with NAME, what NAME was before
//   .NAME.fsdp-old-TOKEN      what NAME was, where the file system cannot exchange two folders in one step
//   .NAME.fsdp-removed-TOKEN  is being removed
//   .NAME.fsdp-lock           a save is under way, as long as its process holds the lock
// Everything in the new folder, and every folder made above it, is on the disk before it takes the name; the manifest is written last. So NAME is
// at every moment a whole checkpoint, or, for the moment between two renames, .NAME.fsdp-old-TOKEN is.
namespace fsdp {

/// The path without trailing slashes or dots. Throws UsageError for one without a name of its own.
std::string checkpoint_path(const std::string& path);
/// The folder in which a save with this token writes.
std::string saving_folder(const std::string& path, const std::string& token);
bool is_checkpoint(const std::string& path);
/// What to read for `path`: itself, or where a save was killed between two renames, what it was before.
std::string readable_checkpoint(const std::string& path);

/// The number at the end of a folder's name, and what stands before it; nullopt: there is none.
struct SeriesName {
  std::string prefix;
  int64_t number = 0;
};
std::optional<SeriesName> series_name(const std::string& name);
/// Complete checkpoints in `parent` by number, ascending; those with `prefix` alone if it is given.
std::vector<std::string> series_in(const std::string& parent, const std::optional<std::string>& prefix);

/// The folders around a save, on the first rank. The destructor removes what was not committed, or what
/// the commit replaced.
class SaveFolder {
 public:
  /// Takes the lock, removes what killed saves left, and makes the folder to write to, with a file that shows the other
  /// ranks that they see the same one. Throws CheckpointError if another save is under way, or `path` is
  /// something else than a checkpoint or an empty folder.
  explicit SaveFolder(const std::string& path);
  ~SaveFolder();
  SaveFolder(const SaveFolder&) = delete;
  SaveFolder& operator=(const SaveFolder&) = delete;

  const std::string& token() const { return token_; }
  const std::string& folder() const { return folder_; }
  void remove_probe() const;
  /// Brings the folder to the disk and gives it the name. own_files: of the new checkpoint; what else the old one's
  /// folder had and was not its own is copied.
  void commit(const std::set<std::string>& own_files);
  /// Removes older checkpoints of the series. What cannot be removed is logged.
  void retain(int keep_last) const;

 private:
  void remove_leftovers() const;
  void carry_over(const std::set<std::string>& own_files) const;
  void exchange() const;

  std::string path_, parent_, name_, token_, folder_;
  int lock_ = -1;
};

/// Throws CheckpointError unless this rank sees the folder that the first rank made.
void check_probe(const std::string& path, const std::string& token);

}  // namespace fsdp
