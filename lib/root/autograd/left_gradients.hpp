#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <thread>
#include <vector>

// Note [Backwards that reach no parameter]
// A root learns of a backward by operators on its unsharded parameters, and by their gradients. The last backward of an
// accumulation may need none of them: a branch that this batch did not take, where all else is ignored. It has to reduce what
// the ones before it have left nonetheless. In C++ nothing but the call of backward tells of it, and not whose it is: so the
// first one on the root's thread reduces, once the user has turned synchronization on again. If it was another model's, the
// root's own comes later and adds to that. Python's modules know their outputs, and so their backwards (join_backward).
namespace fsdp {

class RootContext;

/// What the backwards of a root have left that reduced nothing, or waited for nothing. kNotYet: until the user says that the
/// next one does.
enum class LeftGradients { kNone, kNotYet, kToReduce };
/// Takes the root's lock.
LeftGradients left_gradients_of(RootContext& root);

/// At the end of a backward of the root, whose forwards `thread` runs: if it has left any, a later one is to reduce them.
void note_left_gradients(RootContext& root, std::thread::id thread);

/// While it lives, a backward from `tensor` is also one of this thread's roots with such gradients.
class JoinedRoots {
 public:
  explicit JoinedRoots(const at::Tensor& tensor);
  ~JoinedRoots();
  JoinedRoots(const JoinedRoots&) = delete;
  JoinedRoots& operator=(const JoinedRoots&) = delete;

 private:
  const at::Tensor& tensor_;
  std::vector<unsigned> hooks_;
};

}  // namespace fsdp
