#include "comm/comm_memory.hpp"

namespace fsdp {

namespace {

class ProcessGroupMemory {
 public:
  explicit ProcessGroupMemory(std::shared_ptr<Communicator> group) : group_(std::move(group)) {}
  virtual ~ProcessGroupMemory() = default;

 protected:
  at::Tensor allocate_or(int64_t numel, const at::TensorOptions& options, Comm& otherwise) const {
    auto memory = allocate_for_comm(*group_, numel, options);
    return memory.defined() ? memory : otherwise.Comm::allocate(numel, options);
  }

 private:
  std::shared_ptr<Communicator> group_;
};

class ProcessGroupAllGather final : public AllGatherComm, public ProcessGroupMemory {
 public:
  using ProcessGroupMemory::ProcessGroupMemory;
  at::Tensor allocate(int64_t numel, const at::TensorOptions& options) override {
    return allocate_or(numel, options, *this);
  }
};

class ProcessGroupReduceScatter final : public ReduceScatterComm, public ProcessGroupMemory {
 public:
  using ProcessGroupMemory::ProcessGroupMemory;
  at::Tensor allocate(int64_t numel, const at::TensorOptions& options) override {
    return allocate_or(numel, options, *this);
  }
};

}  // namespace

std::string HasCommMemory::why_no_slots() const { return "which has no symmetric memory here"; }
std::shared_ptr<SymmMemBuffer> HasCommMemory::make_slot(SlotUse /*use*/, int64_t /*bytes*/) { return nullptr; }

std::string why_no_slots(const Communicator& group) {
  const auto* owner = dynamic_cast<const HasCommMemory*>(&group);
  return owner != nullptr ? owner->why_no_slots() : "which has no symmetric memory here";
}

std::shared_ptr<SymmMemBuffer> make_slot(Communicator& group, SlotUse use, int64_t bytes) {
  auto* owner = dynamic_cast<HasCommMemory*>(&group);
  return owner != nullptr ? owner->make_slot(use, bytes) : nullptr;
}

at::Tensor allocate_for_comm(Communicator& group, int64_t numel, const at::TensorOptions& options) {
  auto* owner = dynamic_cast<HasCommMemory*>(&group);
  return owner != nullptr && numel > 0 ? owner->allocate_for_comm(numel, options) : at::Tensor();
}

std::shared_ptr<AllGatherComm> process_group_all_gather(std::shared_ptr<Communicator> group) {
  return std::make_shared<ProcessGroupAllGather>(std::move(group));
}

std::shared_ptr<ReduceScatterComm> process_group_reduce_scatter(std::shared_ptr<Communicator> group) {
  return std::make_shared<ProcessGroupReduceScatter>(std::move(group));
}

bool is_process_group_comm(const Comm* comm) {
  return dynamic_cast<const ProcessGroupMemory*>(comm) != nullptr;
}

}  // namespace fsdp
