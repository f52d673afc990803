#pragma once

#include <memory>
#include <vector>

#include "collectives/all_gather.hpp"
#include "comm/comm_memory.hpp"
#include "group/gather/all_gather_inputs.hpp"
#include "group/gather/unshard_state.hpp"
#include "group/gather/unsharded_memory.hpp"
#include "group/group_parts.hpp"

namespace fsdp {

/// How one group becomes readable, and lets go: the states of unshard_state.hpp. *When* is its root's business.
///
/// Not thread-safe: the root's lock guards it.
class Unsharder {
 public:
  /// parts: outlive this.
  Unsharder(GroupParts& parts, Extensions extensions) : parts_(parts), inputs_(std::move(extensions)) {}

  UnshardState state() const { return state_; }
  bool is_held() const { return holds_unsharded(state_); }

  /// How a gather is launched.
  struct Launch {
    SymmMemBuffer* slot = nullptr;     ///< registered memory to gather into (GatherSlots); null: memory of its own
    bool may_overlap_copies = false;  ///< copies from host memory may go on while the host does
  };
  /// Throws StateError where there is nothing to gather.
  void check_can_unshard() const;
  /// Starts the gather unless the group is unsharded or it has started. Never waits. Throws CommError; released as before
  /// then.
  void unshard(const Launch& launch);
  /// Finishes the gather; operators can read the parameters when this returns. Throws CommError; released as before
  /// `unshard` then.
  void wait_for_unshard();
  /// The current stream is about to use the unsharded parameters, which may have been made readable on another one.
  void wait_before_use() { memory_.begin_use(); }
  /// Releases the unsharded parameters, or gives up a gather under way, and drops what `reshard_after_forward` kept.
  /// Nothing is lost.
  void reshard();
  /// Releases after forward. over: the ranks that the next gather is to be over; this rank's piece for it is kept, so
  /// nothing has been written since. Null: it is over all, and nothing is kept.
  void reshard_after_forward(const std::shared_ptr<Communicator>& over);
  /// A gather that is under way goes on without it.
  void drop_post_forward_piece();
  /// The group goes: gives up a gather, or what is unsharded.
  void abandon() noexcept;
  /// Nothing is unsharded and other memory or another device may have come: the state that this is (kAliased, kMeta,
  /// kSharded). Where nothing is ever released, the unsharded parameters show this rank's memory.
  void rest();

  /// Null: none, or one that sends nothing.
  Work* gather_under_way() const { return gather_.work.get(); }
  AllGatherInputs& inputs() { return inputs_; }
  const AllGatherInputs& inputs() const { return inputs_; }
  /// What travels from now on, of a group that is released; buffers of the old layout go. With a layout and dtypes that
  /// `inputs().plan` has been asked for.
  void set_encoded(std::unique_ptr<EncodedGather> encoded);

  UnshardedMemory& memory() { return memory_; }
  const UnshardedMemory& memory() const { return memory_; }
  /// Another group's gather needs the slot that this one may be in: parameters that are unsharded, or being gathered, go
  /// on in memory of their own. This rank's business: no communication but waiting.
  void leave_slot();

  /// An operator has written to unsharded parameter `index`: this rank's rows of it go to its shard.
  void write_back(size_t index);

 private:
  /// The piece of the unsharded parameters that this rank sends in a gather over fewer ranks.
  struct PostForward {
    PieceLayout layout;
    at::Tensor piece;
    std::shared_ptr<Communicator> group;
  };

  UnshardState next(UnshardEvent event) const {
    const auto [next, error] = transition(state_, event);
    if (error != nullptr) [[unlikely]]
      refuse(error);
    return next;
  }
  [[noreturn]] void refuse(const char* error) const;
  /// A piece goes with the last state that has one.
  void enter(UnshardState state) {
    state_ = state;
    if (post_forward_.piece.defined() && !has_post_forward_piece(state)) post_forward_.piece.reset();
  }
  void release(UnshardEvent event);
  void give_up_gather() noexcept;
  void keep_post_forward_piece(const std::shared_ptr<Communicator>& over);
  void hide();
  void show(at::Tensor unsharded);
  AllGather start_gather(const Launch& launch);
  AllGather start_gather_of_shard(GatherMemory memory, bool may_overlap_copies);
  AllGather start_encoded_gather(bool may_overlap_copies);
  AllGather start_gather_of_post_forward_piece();
  /// write: this rank's part, `AllGather::local`.
  template <class Write>
  AllGather start_packed_gather(const PieceLayout& layout, const GatherCall& call, Write&& write);
  GatherCall call_over(Communicator& comm) const;
  at::Tensor finish_gather(AllGather gather) const;
  void count_gather(Communicator& comm);
  void let_go_of_views(bool keeps_inputs);
  /// What a gather sends is this rank's rows as they lie.
  bool sends_shard(const at::Tensor& sent) const { return sent.is_same(parts_.shard.bytes()); }
  /// What it sends has been packed for it.
  bool owns_input(const AllGather& gather) const {
    return !sends_shard(gather.local) && !gather.local.is_same(post_forward_.piece);
  }

  GroupParts& parts_;
  AllGatherInputs inputs_;
  UnshardState state_ = UnshardState::kSharded;
  AllGather gather_;
  PostForward post_forward_;
  UnshardedMemory memory_;
  GatherViews views_;              // of gathers of the shard as it lies
};

}  // namespace fsdp
