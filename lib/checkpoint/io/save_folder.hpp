#pragma once

#include <memory>
#include <set>
#include <string>

#include "checkpoint/io/save_lock.hpp"

namespace fsdp {

/// The folders around a save, on the first rank (Note [Steps of a save]). The destructor removes what was not committed, or
/// what the commit replaced.
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
  std::unique_ptr<SaveLock> lock_;
};

/// Throws CheckpointError unless this rank sees the folder that the first rank made.
void check_probe(const std::string& path, const std::string& token);

}  // namespace fsdp
