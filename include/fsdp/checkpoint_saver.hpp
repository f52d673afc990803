#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>

#include "fsdp/api.hpp"
#include "fsdp/checkpoint.hpp"

namespace fsdp {

/// What happens if a save is requested while another one is being written.
enum class WhenSaving { kWait, kRefuse };

struct FSDP_API CheckpointSaverOptions {
  /// The ranks that save, as in SaveCheckpointOptions.
  std::shared_ptr<Communicator> world = nullptr;
  WhenSaving when_saving = WhenSaving::kWait;
  /// A rank with at most this many bytes to save copies them to the host's memory first. The saver keeps that memory, as
  /// allocating it again would take several times as long as the copy. A rank with more bytes writes from the tensors, so
  /// `start_save` returns there when they are written.
  int64_t max_copy_bytes = std::numeric_limits<int64_t>::max();
};

/// Saves checkpoints while training goes on: tensors are copied, and a thread writes the copy.
///
/// All ranks make one and make the same calls. Not thread-safe. Saves do not overlap. A save fails on all ranks or on none; the
/// next call throws its error. The destructor waits for a save, and logs an error that no call has thrown.
class FSDP_API CheckpointSaver {
 public:
  /// A collective call: it makes a group of ranks for the threads.
  explicit CheckpointSaver(const CheckpointSaverOptions& options = {});
  ~CheckpointSaver();
  CheckpointSaver(const CheckpointSaver&) = delete;
  CheckpointSaver& operator=(const CheckpointSaver&) = delete;

  /// Saves as save_checkpoint does, over this saver's `world`, but returns true as soon as all is copied. With kRefuse, returns
  /// false on all ranks if any rank is still writing. Throws the error of an earlier save, and starts none then.
  bool start_save(const std::string& path, const Checkpoint& checkpoint, SaveCheckpointOptions options = {});
  /// Saves the parts that `collect` returns as save_checkpoint_parts does, and returns as `start_save` does. `collect` is
  /// called once no other save is being written; if it throws on some ranks, all ranks throw.
  bool start_save_parts(const std::string& path, const std::function<CheckpointParts()>& collect,
                        SaveCheckpointOptions options = {});
  /// Returns when this rank writes nothing. Throws the error of the last save, once.
  void wait();
  /// Whether this rank is writing.
  bool is_saving() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace fsdp
