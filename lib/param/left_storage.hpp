#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace fsdp {

/// The memory that parameters had before fully_shard, and that other tensors still show: views, aliases (detach, data,
/// set_data), what autograd has saved. It is not kept alive.
///
/// Where it was the parameter's alone, whatever else shows it is the parameter to the plain program, and goes on with values
/// that are not the parameter's once that is written. So it is closed: whoever reads it gets an error that names the
/// parameter. A graph that was recorded before needs the memory for its backward: as long as there may be one, it is open until
/// the first forward, or the first write.
class LeftStorages {
 public:
  struct Left {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    int64_t bytes = 0;
    std::vector<size_t> params;  ///< by index
    bool is_larger = false;      ///< than the parameter: others may have other parts of it
    bool has_graph = false;      ///< autograd has recorded the parameter
  };
  enum class Closes { kNever, kWhereWhole };

  /// Notes the memory that `unsharded_param` is about to leave, and that its values have been copied out of.
  void note(const at::Tensor& unsharded_param, size_t index, Closes closes);
  /// Closes what no graph needs, once the parameters have left. name_of: of a parameter, by index.
  template <class NameOf>
  void settle(NameOf name_of) {
    forget_unused();
    for (const auto& left : left_)
      if (!left.is_larger) mark(left, name_of(left.params.front()), left.has_graph ? Reads::kAreAllowed : Reads::kThrow);
  }
  /// Closes all that is left: nothing of it shows the parameters any more. name_of: as above.
  template <class NameOf>
  void close(NameOf name_of) {
    if (left_.empty()) [[likely]]
      return;
    forget_unused();
    for (const auto& left : left_)
      if (!left.is_larger) mark(left, name_of(left.params.front()), Reads::kThrow);
  }
  /// Notes the memory of `piece`: parameter `index` has gone on in it, its memory of before fully_shard, and leaves it now.
  void note_kept(const at::Tensor& piece, size_t index);
  /// Hands over what parameter `index` has left: it goes on in another group, as its parameter `index_there`, and what shows it
  /// is closed from there.
  void hand_over(size_t index, LeftStorages& to, size_t index_there);
  /// Returns those that a tensor still uses; all are forgotten.
  std::vector<Left> take_used();

 private:
  enum class Reads { kAreAllowed, kThrow };
  static void mark(const Left& left, const std::string& name, Reads reads);
  void forget_unused();

  std::vector<Left> left_;
};

/// Notes that `param`, called `name`, goes on in the memory that it had before fully_shard (one rank's), as long as `piece` is
/// there.
void note_kept_memory(const at::Tensor& param, const at::Tensor& piece, const std::string& name);
/// True if another parameter than that of `piece` goes on in some of its memory.
bool is_kept_by_another(const at::Tensor& piece);
/// Returns the name of a parameter that goes on in memory of which `tensor` shows some, too; none: "".
std::string keeper_of_memory(const at::Tensor& tensor);

/// Returns what to say of a tensor that shows the memory that a parameter has left; null for any other.
const std::string* said_of_left_memory(const at::Tensor& tensor);

}  // namespace fsdp
