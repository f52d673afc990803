#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

// Note [Steps of a save]
// Beside the folder `NAME` that is saved, hidden ones show what a save was doing when it was killed:
//   .NAME.fsdp-saving-TOKEN   is being written; after the exchange with NAME, what NAME was before
//   .NAME.fsdp-old-TOKEN      what NAME was, where the file system cannot exchange two folders in one step
//   .NAME.fsdp-removed-TOKEN  is being removed
//   .NAME.fsdp-lock           a save is under way, as long as its process holds the lock
// Everything in the new folder, and every folder made above it, is on the disk before it takes the name; the manifest is
// written last. So NAME is at every moment a whole checkpoint, or, for the moment between two renames,
// .NAME.fsdp-old-TOKEN is.
namespace fsdp {

/// One of the names above. kind: "saving-TOKEN", "lock"...
std::string hidden_name(const std::string& name, const std::string& kind);
/// The checkpoint whose save left `entry` behind; nullopt: nothing of ours.
std::optional<std::string> left_by(const std::string& entry);
/// All names in a folder, sorted. Throws CheckpointError.
std::vector<std::string> names_in(const std::string& folder);

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

}  // namespace fsdp
