// Only in builds with CUDA.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "comm/nccl/nccl_group_config.hpp"
#include "comm/nccl/nccl_link.hpp"
#include "comm/nccl/nccl_memory.hpp"

namespace fsdp {

/// The memory that one group's ranks have registered together (Note [Memory that NCCL knows]).
///
/// next_request, enroll: in the order of launches, which is the same on all ranks. The others: any thread.
class NcclWindows {
 public:
  /// `group` outlives this.
  explicit NcclWindows(const NcclGroupConfig& group) : group_(group) {}

  /// False once making one has shown that there are none.
  bool may_exist() const { return may_exist_; }

  /// A name for the next one. Size and use are part of it, so that ranks that differ do not take each other for an answer.
  std::string next_request(int64_t bytes, const char* use);
  /// Registers a block for all ranks; null: this rank has none. True if all ranks have registered theirs; false, on all of
  /// them, if one could not, which is said in the log: then there are none for good. Waits for the others. register_it: calls
  /// NCCL's registration, which all ranks do at once; null: NCCL has no windows.
  bool enroll(const std::shared_ptr<NcclBlock>& block, const std::string& request, const Patience& patience,
              const std::function<ncclWindow_t()>& register_it);
  /// A graph has captured a collective of these: the blocks in which they lie may be used again whenever it runs.
  void note_captured(std::span<const at::Tensor> tensors);

  /// Keeps the block until `drop_kept`, if it has a window.
  void keep(std::shared_ptr<NcclBlock> block);
  void drop_kept();
  /// Returns all blocks that may have a window. Those that come after this are not among the next ones.
  std::vector<std::shared_ptr<NcclBlock>> take_blocks();

 private:
  bool all_say(bool yes, const std::string& question, const Patience& patience);

  const NcclGroupConfig& group_;
  int requests_ = 0;
  bool may_exist_ = true;
  std::mutex mutex_;  // of the blocks
  std::vector<std::weak_ptr<NcclBlock>> blocks_;
  std::vector<std::shared_ptr<NcclBlock>> kept_blocks_;
};

}  // namespace fsdp
