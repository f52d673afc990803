#pragma once

#include <memory>
#include <string>
#include <utility>

namespace fsdp {

/// The right to write the checkpoint `name` in the folder `parent`, or what lies beside it: a file that shows a save under
/// way (Note [Steps of a save]). It ends with this object, or with the process.
class SaveLock {
 public:
  /// Null: somebody else has it, in this process or another. Throws CheckpointError where it cannot be taken.
  static std::unique_ptr<SaveLock> take(const std::string& parent, const std::string& name);
  ~SaveLock();
  SaveLock(const SaveLock&) = delete;
  SaveLock& operator=(const SaveLock&) = delete;

 private:
  SaveLock(std::string path, int descriptor) : path_(std::move(path)), descriptor_(descriptor) {}

  std::string path_;
  int descriptor_;
};

}  // namespace fsdp
