#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace fsdp {

/// The larger storages that parameters were views of before fully_shard. They are not kept alive.
class LeftStorages {
 public:
  struct Left {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    int64_t bytes = 0;
    std::vector<size_t> params;  ///< by index
  };

  /// unsharded_param: about to leave its storage, which its values have been copied out of.
  void note(const at::Tensor& unsharded_param, size_t index);
  /// Those that a tensor still uses; all are forgotten.
  std::vector<Left> take_used();

 private:
  std::vector<Left> left_;
};

}  // namespace fsdp
