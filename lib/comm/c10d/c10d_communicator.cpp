#include "comm/c10d/c10d_communicator.hpp"

#include <c10/core/ScalarType.h>
#include <fmt/format.h>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <exception>

#include "base/first_line.hpp"
#include "base/log.hpp"
#include "base/require.hpp"
#include "comm/c10d/c10d_arguments.hpp"
#include "comm/c10d/c10d_failure.hpp"
#include "comm/c10d/c10d_work.hpp"
#include "comm/c10d/transport_error.hpp"
#include "comm/checks.hpp"
#include "comm/comm_memory.hpp"
#include "comm/scaled_sum.hpp"
#include "comm/total_bytes.hpp"
#include "comm/work.hpp"

namespace fsdp {
namespace {

// Note [No factor goes through c10d]
// c10d's NCCL backend of torch 2.11 hands NCCL the factor of a PREMUL_SUM as a float where the tensor is bfloat16. NCCL reads
// the first two of its four bytes, which of 1/2, 1/4 and 1/8 are zero, and so is the sum; nothing says so. So no factor goes
// through c10d in any dtype: an average is AVG, whose factor NCCL makes itself, and for any other the caller divides.

class C10dCommunicator final : public Communicator,
                               public HasNoticeBoard,
                               public HasCommMemory,
                               public HasScaledSums {
 public:
  explicit C10dCommunicator(C10dGroup group)
      : Communicator(group.backend->getRank(), std::move(group.world_ranks), std::move(group.name)),
        backend_(std::move(group.backend)),
        backend_name_(backend_->getBackendName()),
        launches_batches_(group.launches_batches),
        packs_below_(group.packs_below),
        device_type_(group.device_type),
        store_(std::move(group.store)),
        make_backend_(std::move(group.make_backend)),
        is_borrowed_(group.is_borrowed),
        notices_(std::move(group.notices)),
        place_(std::move(group.place)),
        failure_(std::make_shared<C10dFailure>(
            is_borrowed_ ? nullptr : dynamic_cast<HasPeerConnections*>(backend_.get()))) {
    if (!notices_ && store_) notices_ = store_notice_board(store_);
  }

  ~C10dCommunicator() override {
    leave();
    failure_->forget_connections();
  }

  c10::DeviceType device_type() const override { return device_type_; }
  std::string backend() const override { return backend_name_; }
  bool launches_batches() const override { return launches_batches_; }
  int64_t packs_below() const override { return packs_below_; }
  // Of others we do not know it; gloo waits until tensors of a device have come through the host.
  bool waits_in_streams() const override { return backend_name_ == "nccl" || backend_name_ == "fake"; }

  std::shared_ptr<Work> start_all_gather(const at::Tensor& output, const at::Tensor& input,
                                         std::string_view subject) override {
    checks::all_gather(*this, output, input, subject);
    return start("all_gather", subject, output, [&] {
      at::Tensor to = as_sent(output);
      at::Tensor from = as_sent(input);
      return backend_->_allgather_base(to, from, c10d::AllgatherOptions());
    });
  }

  std::shared_ptr<Work> start_reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                                             ReduceOp op, std::string_view subject) override {
    return reduce_scatter(output, input, c10d_op(op), subject);
  }

  std::shared_ptr<Work> start_all_reduce(const at::Tensor& tensor, ReduceOp op,
                                         std::string_view subject) override {
    return all_reduce(tensor, c10d_op(op), subject);
  }

  // See Note [No factor goes through c10d].
  bool scales_sums(const ScaledSum& sum) const override {
    return backend_name_ == "nccl" && nccl_scales_sums(sum.dtype) && is_average(sum.scale, *this);
  }

  std::shared_ptr<Work> start_scaled_reduce_scatter(std::span<const at::Tensor> outputs,
                                                    std::span<const at::Tensor> inputs, double scale,
                                                    std::string_view subject) override {
    check_scales(inputs, scale, "reduce_scatter", subject);
    return outputs.size() == 1 ? reduce_scatter(outputs[0], inputs[0], c10d::ReduceOp::AVG, subject)
                               : reduce_scatter_batch(outputs, inputs, c10d::ReduceOp::AVG, subject);
  }

  std::shared_ptr<Work> start_scaled_all_reduce(const at::Tensor& tensor, double scale,
                                                std::string_view subject) override {
    check_scales({&tensor, 1}, scale, "all_reduce", subject);
    return all_reduce(tensor, c10d::ReduceOp::AVG, subject);
  }

  std::shared_ptr<Work> start_broadcast(const at::Tensor& tensor, int root,
                                        std::string_view subject) override {
    checks::broadcast(*this, tensor, root, subject);
    return start("broadcast", subject, tensor, [&] {
      c10d::BroadcastOptions options;
      options.rootRank = root;
      std::vector<at::Tensor> one = {as_sent(tensor)};
      return backend_->broadcast(one, options);
    });
  }

  std::shared_ptr<Work> start_all_gather_batch(std::span<const at::Tensor> outputs,
                                               std::span<const at::Tensor> inputs,
                                               std::string_view subject) override {
    if (!launches_batches()) return Communicator::start_all_gather_batch(outputs, inputs, subject);
    checks::all_gather_batch(*this, outputs, inputs, subject);
    return start("all_gather", subject, outputs, [&] {
      auto to = as_sent(outputs);
      auto from = as_sent(inputs);
      return backend_->allgather_into_tensor_coalesced(to, from, c10d::AllgatherOptions());
    });
  }

  std::shared_ptr<Work> start_reduce_scatter_batch(std::span<const at::Tensor> outputs,
                                                   std::span<const at::Tensor> inputs, ReduceOp op,
                                                   std::string_view subject) override {
    return reduce_scatter_batch(outputs, inputs, c10d_op(op), subject);
  }

  std::shared_ptr<Communicator> split(std::span<const int> ranks, const std::string& name) override;

  std::shared_ptr<NoticeBoard> notice_board() override { return notices_; }
  std::shared_ptr<GroupPlace> place() override { return place_; }

  at::Tensor allocate_for_comm(int64_t numel, const at::TensorOptions& options) override {
    const auto device = options.device();
    if (!device.has_index() || !backend_->supportsTensorAlloc(device.index())) return {};
    return backend_->allocateTensor(static_cast<long>(numel), options);
  }

  void abort(const std::string& reason) override {
    failure_->set(reason);
    try {
      backend_->abort();
    } catch (const std::exception& error) {
      log().warn("aborting group '{}' failed: {}", this->name(), first_line(error.what()));
    }
    failure_->disconnect();
  }

 private:
  void leave() {
    if (is_borrowed_ && !failure_->is_set()) return;
    try {
      // A backend finishes what is pending before it goes. Where the group has failed, or an
      // exception ends this rank, the peers may never do their part.
      if (failure_->is_set() || std::uncaught_exceptions() > 0) {
        backend_->abort();
        failure_->disconnect();
      } else if (backend_name_ == "nccl") {
        backend_->shutdown();
      }
    } catch (const std::exception& error) {
      log().warn("closing group '{}' failed: {}", name(), first_line(error.what()));
    }
  }

  std::shared_ptr<Work> reduce_scatter(const at::Tensor& output, const at::Tensor& input, const c10d::ReduceOp& op,
                                       std::string_view subject) {
    checks::reduce_scatter(*this, output, input, subject);
    return start("reduce_scatter", subject, input, [&] {
      c10d::ReduceScatterOptions options;
      options.reduceOp = op;
      at::Tensor to = output;
      at::Tensor from = input;
      return backend_->_reduce_scatter_base(to, from, options);
    });
  }

  std::shared_ptr<Work> reduce_scatter_batch(std::span<const at::Tensor> outputs, std::span<const at::Tensor> inputs,
                                             const c10d::ReduceOp& op, std::string_view subject) {
    if (!launches_batches())  // says so
      return Communicator::start_reduce_scatter_batch(outputs, inputs, ReduceOp::kSum, subject);
    checks::reduce_scatter_batch(*this, outputs, inputs, subject);
    return start("reduce_scatter", subject, inputs, [&] {
      c10d::ReduceScatterOptions options;
      options.reduceOp = op;
      std::vector<at::Tensor> to(outputs.begin(), outputs.end());
      std::vector<at::Tensor> from(inputs.begin(), inputs.end());
      return backend_->reduce_scatter_tensor_coalesced(to, from, options);
    });
  }

  std::shared_ptr<Work> all_reduce(const at::Tensor& tensor, const c10d::ReduceOp& op, std::string_view subject) {
    checks::all_reduce(*this, tensor, subject);
    return start("all_reduce", subject, tensor, [&] {
      c10d::AllreduceOptions options;
      options.reduceOp = op;
      std::vector<at::Tensor> one = {tensor};
      return backend_->allreduce(one, options);
    });
  }

  void check_scales(std::span<const at::Tensor> summed, double scale, const char* operation,
                    std::string_view subject) const {
    for (const at::Tensor& tensor : summed)
      require(scales_sums({.dtype = tensor.scalar_type(), .scale = scale}),
              "{} of '{}' in group '{}': sums of {} over backend {} cannot be scaled by {}; ask scaled_sums_of() first",
              operation, subject, name(), c10::toString(tensor.scalar_type()), backend_name_, scale);
  }

  template <class Launch>
  std::shared_ptr<Work> start(const char* operation, std::string_view subject,
                              std::span<const at::Tensor> full, const Launch& launch) {
    failure_->check(operation, subject, *this);
    const int64_t bytes = total_bytes(full);
    if (bytes == 0) return completed_work();
    CollectiveInfo info(operation, subject, *this, bytes);
    try {
      const bool waits_in_slices = full.front().is_cpu() && !is_borrowed_;
      return c10d_work(launch(), failure_, std::move(info), waits_in_slices ? HostWait::kInSlices : HostWait::kAtOnce);
    } catch (const std::exception& error) {
      failure_->fail(transport_error(error.what()));
      CollectiveInfo(operation, subject, *this, bytes).fail(transport_error(error.what()));
    }
  }

  template <class Launch>
  std::shared_ptr<Work> start(const char* operation, std::string_view subject,
                              const at::Tensor& full, const Launch& launch) {
    return start(operation, subject, std::span<const at::Tensor>(&full, 1), launch);
  }

  c10::intrusive_ptr<c10d::Backend> backend_;
  std::string backend_name_;
  bool launches_batches_;
  int64_t packs_below_;
  c10::DeviceType device_type_;
  c10::intrusive_ptr<c10d::Store> store_;
  BackendFactory make_backend_;
  bool is_borrowed_;
  std::shared_ptr<NoticeBoard> notices_;
  std::shared_ptr<GroupPlace> place_;
  std::shared_ptr<C10dFailure> failure_;
  int splits_ = 0;
};

std::shared_ptr<Communicator> C10dCommunicator::split(std::span<const int> ranks,
                                                      const std::string& name) {
  SplitPlan plan = plan_split(*this, ranks, name);
  require(
      store_ != nullptr && make_backend_ != nullptr,
      "split of group '{}' into '{}': the group was made without a store, which a split needs; make it with init_process_group",
      this->name(), name);
  // Counted by members and others alike, so that all ranks know the same key.
  const std::string key = fmt::format("split_{}", splits_++);
  if (plan.rank < 0) return nullptr;
  C10dGroup group{.backend = nullptr,
                  .world_ranks = plan.world_ranks,
                  .name = plan.name,
                  .device_type = device_type_,
                  .store = c10::make_intrusive<c10d::PrefixStore>(key, store_),
                  .make_backend = make_backend_,
                  .launches_batches = launches_batches_,
                  .packs_below = packs_below_,
                  .notices = notices_,
                  .place = place_->below(name, plan.world_ranks)};
  try {
    group.backend =
        make_backend_(group.store, plan.rank, static_cast<int>(plan.world_ranks.size()));
  } catch (const std::exception& error) {
    throw CommError(fmt::format("split of group '{}' into '{}' on rank {} of {} failed: {}",
                                this->name(), plan.name, rank(), size(), transport_error(error.what())),
                    {.operation = "split", .subject = plan.name, .group = this->name(), .rank = rank(), .size = size()});
  }
  return c10d_communicator(std::move(group));
}

}  // namespace

std::shared_ptr<Communicator> c10d_communicator(C10dGroup group) {
  require(group.backend != nullptr, "c10d_communicator: expected a backend, found none");
  require(static_cast<int>(group.world_ranks.size()) == group.backend->getSize(),
          "c10d_communicator: group '{}' has {} ranks but its backend has {}", group.name,
          group.world_ranks.size(), group.backend->getSize());
  return std::make_shared<C10dCommunicator>(std::move(group));
}

}  // namespace fsdp
