#include "fsdp/communicator.hpp"

#include <fmt/format.h>

#include "base/require.hpp"
#include "comm/work.hpp"

namespace fsdp {
namespace {

class CompletedWork final : public Work {
 public:
  void wait() override {}
  bool is_completed() override { return true; }
  bool hold_back(Communicator& /*other*/) override { return true; }
};

}  // namespace

const std::shared_ptr<Work>& completed_work() {
  static const std::shared_ptr<Work> work = std::make_shared<CompletedWork>();
  return work;
}

std::string with_separators(int64_t value) {
  std::string digits = std::to_string(value);
  const int first = digits.front() == '-' ? 1 : 0;
  for (int at = static_cast<int>(digits.size()) - 3; at > first; at -= 3) digits.insert(at, 1, ',');
  return digits;
}

std::string CollectiveInfo::describe() const {
  return fmt::format("{} of '{}' ({} bytes) in group '{}' on rank {} of {}", operation, subject,
                     with_separators(bytes), group, rank, size);
}

void CollectiveInfo::fail(std::string_view reason) const {
  throw CommError(fmt::format("{} failed: {}", describe(), reason), failed());
}

std::shared_ptr<Work> Communicator::start_all_gather_batch(std::span<const at::Tensor> /*outputs*/,
                                                           std::span<const at::Tensor> /*inputs*/,
                                                           std::string_view subject) {
  require_state(false,
                "all_gather of '{}' in group '{}': the {} backend launches no batches; ask "
                "launches_batches() first, and pack where it is false",
                subject, name(), backend());
  return nullptr;
}

std::shared_ptr<Work> Communicator::start_reduce_scatter_batch(
    std::span<const at::Tensor> /*outputs*/, std::span<const at::Tensor> /*inputs*/,
    ReduceOp /*op*/, std::string_view subject) {
  require_state(false,
                "reduce_scatter of '{}' in group '{}': the {} backend launches no batches; ask "
                "launches_batches() first, and pack where it is false",
                subject, name(), backend());
  return nullptr;
}

}  // namespace fsdp
