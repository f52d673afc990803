#include "comm/c10d/borrowed_group.hpp"

#include <fmt/format.h>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>

#include "base/require.hpp"
#include "comm/backend_factory.hpp"
#include "comm/checks.hpp"
#include "comm/forwarding.hpp"
#include "comm/nccl/nccl_backend.hpp"
#include "comm/single_rank.hpp"

namespace fsdp {
namespace {

using ProcessGroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// What a class derived in Python can override: before torch 2.15 a batch alone.
template <class Group, class Collective, class Options>
WorkPtr as_batch(Group& group, Collective collective, at::Tensor& output, at::Tensor& input, const Options& options) {
  std::vector<at::Tensor> outputs = {output}, inputs = {input};
  return (group.*collective)(outputs, inputs, options);
}

template <class Group>
WorkPtr gather_on(Group& group, at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) {
  if constexpr (requires { group.all_gather_single(output, input, options); })
    return group.all_gather_single(output, input, options);
  else
    return as_batch(group, &Group::allgather_into_tensor_coalesced, output, input, options);
}

template <class Group>
WorkPtr reduce_on(Group& group, at::Tensor& output, at::Tensor& input,
                  const c10d::ReduceScatterOptions& options) {
  if constexpr (requires { group.reduce_scatter_single(output, input, options); })
    return group.reduce_scatter_single(output, input, options);
  else
    return as_batch(group, &Group::reduce_scatter_tensor_coalesced, output, input, options);
}

/// A process group that is no set of backends but does its collectives itself: a class derived in Python.
class SelfMadeBackend final : public c10d::Backend {
 public:
  explicit SelfMadeBackend(ProcessGroupPtr group)
      : Backend(group->getRank(), group->getSize()), group_(std::move(group)) {}

  const std::string getBackendName() const override { return group_->getBackendName(); }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    return gather_on(*group_, output, input, options);
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    return reduce_on(*group_, output, input, options);
  }
  WorkPtr allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& options) override {
    return group_->allreduce(tensors, options);
  }
  WorkPtr broadcast(std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& options) override {
    return group_->broadcast(tensors, options);
  }

 private:
  ProcessGroupPtr group_;
};

/// A group of a kind that only its owner can make.
class OwnersGroup final : public ForwardingCommunicator {
 public:
  OwnersGroup(std::shared_ptr<Communicator> inner, BorrowedGroupOptions options)
      : ForwardingCommunicator(std::move(inner)), options_(std::move(options)) {}

  std::shared_ptr<Communicator> split(std::span<const int> ranks, const std::string& name) override {
    SplitPlan plan = plan_split(*this, ranks, name);
    require(options_.new_group && std::is_sorted(plan.world_ranks.begin(), plan.world_ranks.end()),
            "split of group '{}' into '{}': groups of backend '{}' are made by torch's new_group, which {}", this->name(),
            name, backend(), options_.new_group ? "needs the ranks in ascending order" : "is not available here");
    if (plan.rank < 0) return nullptr;
    auto options = options_;
    options.world_ranks = plan.world_ranks;
    return borrowed_group(options_.new_group(plan.world_ranks, plan.name), std::move(options));
  }

 private:
  BorrowedGroupOptions options_;
};

c10::intrusive_ptr<c10d::Backend> backend_of(const ProcessGroupPtr& group, c10::DeviceType device_type) {
  if (!group->hasBackends()) return c10::make_intrusive<SelfMadeBackend>(group);
  try {
    return group->getBackend(device_type);
  } catch (const std::exception&) {
    throw UsageError(fmt::format("process group '{}' has no backend for {}; make it with one, or a mesh of "
                                 "another device type",
                                 group->getGroupDesc(), c10::DeviceTypeName(device_type, /*lower_case=*/true)));
  }
}

}  // namespace

std::shared_ptr<Communicator> borrowed_group(const ProcessGroupPtr& group, BorrowedGroupOptions options) {
  require(group != nullptr, "expected a process group, found none");
  if (group->getSize() == 1) return single_rank_on(options.device_type);
  const auto own = backend_of(group, options.device_type);
  const std::string kind = own->getBackendName();
  const bool is_gloo = kind == "gloo";
  // Ours, beside the group's, sends straight from memory, which has to be the host's; c10d's goes through it.
  const bool is_left_to_c10d = is_gloo && options.device_type != c10::DeviceType::CPU;
  C10dGroup made{.backend = own,
                 .world_ranks = options.world_ranks,
                 .name = group->getGroupDesc().empty() ? group->getGroupName() : group->getGroupDesc(),
                 .device_type = options.device_type,
                 .make_backend = is_left_to_c10d ? nullptr : backend_factory(kind, {.timeout = options.timeout}),
                 .launches_batches = kind == "nccl",
                 .packs_below = kind == "nccl" ? kNcclPacksBelow : 0,
                 .is_borrowed = true};
  // Of other kinds we do not know whether there is a store, or what it does (the fake one's keeps nothing).
  if (!made.make_backend)
    return std::make_shared<OwnersGroup>(c10d_communicator(std::move(made)), std::move(options));
  made.store = c10::make_intrusive<c10d::PrefixStore>("fsdp", group->getStore());
  if (is_gloo) {
    made.backend = made.make_backend(c10::make_intrusive<c10d::PrefixStore>("beside", made.store),
                                     group->getRank(), group->getSize());
    made.launches_batches = true;
    made.packs_below = kGlooPacksBelow;
    made.is_borrowed = false;
  }
  return c10d_communicator(std::move(made));
}

}  // namespace fsdp
