#pragma once

#include <atomic>

namespace fsdp {

/// Note [Functions of a user's]
/// A torch::autograd::Function is no operator: LibTorch runs its forward with autograd off, like an evaluation, and leads its
/// gradients to what it was given. An entry of parameters() is to be to such a function what the module's member is: the
/// unsharded parameter, of which each rank has a gradient of its own. As a DTensor it would take what stands beside it, which
/// is this rank's alone, for the same on all ranks. So operators in a function's forward and backward see the unsharded
/// parameter, and autograd's edge leads to that.
///
/// Nobody tells that a function runs. But right before forward LibTorch asks each input for its history, with autograd on; what
/// then comes with autograd off is forward, until something shows that it has ended: an operator on an entry with autograd on,
/// a backward. Without either, an operator behind it sees the unsharded parameter, too: right, in another form. In backward
/// autograd has a current node.

/// Notes that an entry of parameters() has been asked for its history, on this thread.
void begin_function();
/// Notes that who asks for histories on this thread until autograd makes a node is no function: torch::autograd::grad, which
/// looks for leaves.
void expect_no_function();
/// Notes that a backward has begun on this thread: no forward of a function is under way.
void end_functions();

/// True once there has been a function in this process. Programs that have none pay one look an operator.
extern std::atomic<bool> function_was_seen;
bool runs_function();
/// True if operators on this thread are a function's.
inline bool is_in_function() { return function_was_seen.load(std::memory_order_relaxed) && runs_function(); }

/// While it lives, who asks for a parameter's history on this thread wants the DTensor's own: a function of the library's,
/// which brings a gradient of the kind.
class AsksForDTensor {
 public:
  AsksForDTensor();
  ~AsksForDTensor();
  AsksForDTensor(const AsksForDTensor&) = delete;
  AsksForDTensor& operator=(const AsksForDTensor&) = delete;
  static bool is_on();

 private:
  bool before_;
};

}  // namespace fsdp
