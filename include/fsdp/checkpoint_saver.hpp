#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>

#include "fsdp/checkpoint.hpp"

namespace fsdp {

/// What happens to a save that is asked for while another one is being written.
enum class WhenSaving { kWait, kRefuse };

struct CheckpointSaverOptions {
  /// As for save_checkpoint.
  std::shared_ptr<Communicator> world = nullptr;
  WhenSaving when_saving = WhenSaving::kWait;
  /// A rank that holds more than this writes from the tensors themselves: there `start_save` returns when they are
  /// written. Below it, there is one copy of what is saved, in the host's memory, which the saver keeps for the next save:
  /// making it anew would hold a step up for several times as long as filling it.
  int64_t max_copy_bytes = std::numeric_limits<int64_t>::max();
};

/// Saves checkpoints while training goes on: what is saved is copied, and a thread writes it.
///
/// All ranks make one and call it alike. Not thread-safe. Saves do not overlap. One that failed, failed on all ranks; its
/// error is thrown by the next call. The destructor waits, and logs an error that nobody has asked for.
class CheckpointSaver {
 public:
  /// A collective call: the threads have a group of ranks of their own.
  explicit CheckpointSaver(const CheckpointSaverOptions& options = {});
  ~CheckpointSaver();
  CheckpointSaver(const CheckpointSaver&) = delete;
  CheckpointSaver& operator=(const CheckpointSaver&) = delete;

  /// As save_checkpoint, whose `world` is this saver's; returns when all is copied. kRefuse: false, on all ranks, if a
  /// save is still being written on any. Throws what an earlier save failed with, and begins none then.
  bool start_save(const std::string& path, const Checkpoint& checkpoint, SaveCheckpointOptions options = {});
  /// The same for save_checkpoint_parts. collect: called when no other save is being written; what it throws on some ranks
  /// is thrown on all.
  bool start_save_parts(const std::string& path, const std::function<CheckpointParts()>& collect,
                        SaveCheckpointOptions options = {});
  /// Returns when nothing is being written here. Throws what the last save failed with, once.
  void wait();
  /// On this rank.
  bool is_saving() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace fsdp
