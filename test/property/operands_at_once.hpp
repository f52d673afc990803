#pragma once

#include <ATen/record_function.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

namespace fsdp::test {

/// Follows the operators that this thread calls while it lives: of how many bytes of groups one of them reads parameters. So
/// much is there at once, whatever a byte budget says.
class OperandsAtOnce {
 public:
  /// By the address of a tensor's TensorImpl, or of its StorageImpl.
  using GroupOf = std::map<const void*, size_t>;

  /// bytes: of each group.
  explicit OperandsAtOnce(std::vector<int64_t> bytes);
  ~OperandsAtOnce();
  OperandsAtOnce(const OperandsAtOnce&) = delete;
  OperandsAtOnce& operator=(const OperandsAtOnce&) = delete;

  /// What parameters are from now on.
  void set_groups(GroupOf group_of) { group_of_ = std::move(group_of); }
  /// The most since the last call.
  int64_t take();
  /// One has read as much.
  void note(int64_t bytes) { most_ = std::max(most_, bytes); }

 private:
  static std::unique_ptr<at::ObserverContext> on_operator(const at::RecordFunction& function);
  void note(const at::RecordFunction& function);

  std::vector<int64_t> bytes_;  // by group
  GroupOf group_of_;
  at::CallbackHandle handle_;
  int64_t most_ = 0;
};

}  // namespace fsdp::test
