// Compiled in builds with CUDA only; nccl_absent.cpp stands in for it in the others.
#include "comm/nccl/nccl_communicator.hpp"

#include <c10/cuda/CUDAFunctions.h>
#include <fmt/format.h>

#include <numeric>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "base/log.hpp"
#include "base/require.hpp"
#include "comm/checks.hpp"
#include "comm/comm_memory.hpp"
#include "comm/nccl/nccl_backend.hpp"
#include "comm/nccl/nccl_group.hpp"
#include "comm/scaled_sum.hpp"
#include "comm/total_bytes.hpp"

namespace fsdp {
namespace {

ncclDataType_t dtype_to_reduce(const at::Tensor& tensor, const char* operation, std::string_view subject) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return ncclFloat32;
    case at::kDouble:
      return ncclFloat64;
    case at::kHalf:
      return ncclFloat16;
    case at::kBFloat16:
      return ncclBfloat16;
    case at::kFloat8_e4m3fn:
      return ncclFloat8e4m3;
    case at::kFloat8_e5m2:
      return ncclFloat8e5m2;
    case at::kByte:
      return ncclUint8;
    case at::kChar:
      return ncclInt8;
    case at::kInt:
      return ncclInt32;
    case at::kLong:
      return ncclInt64;
    default:
      throw UsageError(fmt::format("{} of '{}': NCCL has no arithmetic for {}; use a dtype such as Float or Int",
                                   operation, subject, c10::toString(tensor.scalar_type())));
  }
}

ncclRedOp_t nccl_op(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return ncclSum;
    case ReduceOp::kMax:
      return ncclMax;
    case ReduceOp::kMin:
      return ncclMin;
  }
  return ncclSum;
}

using Tensors = std::vector<at::Tensor>;

Tensors joined(std::span<const at::Tensor> outputs, std::span<const at::Tensor> inputs) {
  Tensors all(outputs.begin(), outputs.end());
  all.insert(all.end(), inputs.begin(), inputs.end());
  return all;
}

/// How a reduction treats what ranks bring.
struct Reduction {
  ReduceOp op = ReduceOp::kSum;
  std::optional<double> scale = {};
};

class NcclCommunicator final : public Communicator,
                               public HasNoticeBoard,
                               public HasScaledSums,
                               public HasCommMemory {
 public:
  NcclCommunicator(const NcclGroupConfig& config, std::vector<int> world_ranks,
                   std::shared_ptr<NcclWatchdog> watchdog)
      : Communicator(config.rank, std::move(world_ranks), config.name),
        config_(config),
        device_(config.streams->device()),
        api_(*config.api),
        group_(std::make_shared<NcclGroup>(config)),
        watchdog_(std::move(watchdog)) {
    watchdog_->add(*group_);
  }

  ~NcclCommunicator() override {
    watchdog_->remove(*group_);
    group_->close();
  }

  c10::DeviceType device_type() const override { return device_.type(); }
  c10::DeviceIndex device_index() const override { return device_.index(); }
  std::string backend() const override { return "nccl"; }
  bool launches_batches() const override { return true; }
  int64_t packs_below() const override { return kNcclPacksBelow; }
  bool waits_in_streams() const override { return true; }

  std::shared_ptr<Work> start_all_gather(const at::Tensor& output, const at::Tensor& input,
                                         std::string_view subject) override {
    return start_all_gather_batch({&output, 1}, {&input, 1}, subject);
  }

  std::shared_ptr<Work> start_all_gather_batch(std::span<const at::Tensor> outputs,
                                               std::span<const at::Tensor> inputs,
                                               std::string_view subject) override {
    checks::all_gather_batch(*this, outputs, inputs, subject);
    return launch(group_->gathers(), "all_gather", subject, joined(outputs, inputs), total_bytes(outputs),
                  [&](ncclComm_t comm, StreamHandle stream) {
                    ncclResult_t result = ncclSuccess;
                    for (size_t i = 0; i < inputs.size() && result == ncclSuccess; ++i)
                      if (inputs[i].nbytes() > 0)
                        result = api_.all_gather(inputs[i].const_data_ptr(), outputs[i].mutable_data_ptr(),
                                                 inputs[i].nbytes(), ncclUint8, comm, stream);
                    return result;
                  });
  }

  std::shared_ptr<Work> start_reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op,
                                             std::string_view subject) override {
    return start_reduce_scatter_batch({&output, 1}, {&input, 1}, op, subject);
  }

  std::shared_ptr<Work> start_reduce_scatter_batch(std::span<const at::Tensor> outputs,
                                                   std::span<const at::Tensor> inputs, ReduceOp op,
                                                   std::string_view subject) override {
    return reduce_scatter(outputs, inputs, {.op = op}, subject);
  }

  std::shared_ptr<Work> start_all_reduce(const at::Tensor& tensor, ReduceOp op, std::string_view subject) override {
    return all_reduce(tensor, {.op = op}, subject);
  }

  std::shared_ptr<Work> start_broadcast(const at::Tensor& tensor, int root, std::string_view subject) override {
    checks::broadcast(*this, tensor, root, subject);
    return launch(group_->gathers(), "broadcast", subject, {tensor}, total_bytes({&tensor, 1}),
                  [&](ncclComm_t comm, StreamHandle stream) {
                    return api_.broadcast(tensor.const_data_ptr(), tensor.mutable_data_ptr(), tensor.nbytes(),
                                          ncclUint8, root, comm, stream);
                  });
  }

  // Symmetric kernels, for which slots are, know no factors, and averages only from some version on.
  bool scales_sums(const ScaledSum& sum) const override {
    if (sum.reads_slot && !(api_.averages_in_symmetric_kernels() && is_average(sum.scale, *this))) return false;
    return nccl_scales_sums(sum.dtype);
  }

  std::shared_ptr<Work> start_scaled_reduce_scatter(std::span<const at::Tensor> outputs,
                                                    std::span<const at::Tensor> inputs, double scale,
                                                    std::string_view subject) override {
    return reduce_scatter(outputs, inputs, {.scale = scale}, subject);
  }

  std::shared_ptr<Work> start_scaled_all_reduce(const at::Tensor& tensor, double scale,
                                                std::string_view subject) override {
    return all_reduce(tensor, {.scale = scale}, subject);
  }

  std::shared_ptr<Communicator> split(std::span<const int> ranks, const std::string& name) override {
    SplitPlan plan = plan_split(*this, ranks, name);
    // Counted by members and others alike, so that all ranks know the same key.
    const std::string key = fmt::format("split_{}", splits_++);
    if (plan.rank < 0) return nullptr;
    NcclGroupConfig config = config_;
    config.name = plan.name;
    config.rank = plan.rank;
    config.size = static_cast<int>(plan.world_ranks.size());
    config.key = fmt::format("{}/{}", config_.key, key);
    config.store = c10::make_intrusive<c10d::PrefixStore>(key, config_.store);
    config.place = config_.place->below(name, plan.world_ranks);
    return std::make_shared<NcclCommunicator>(config, std::move(plan.world_ranks), watchdog_);
  }

  at::Tensor allocate_for_comm(int64_t /*numel*/, const at::TensorOptions& /*options*/) override { return {}; }
  std::string why_no_slots() const override {
    if (api_.has_memory() && api_.has_windows()) return {};
    return fmt::format("which has no symmetric memory in NCCL {}: that begins with NCCL 2.27", api_.version());
  }
  std::shared_ptr<SymmMemBuffer> make_slot(SlotUse use, int64_t bytes) override {
    if (!why_no_slots().empty()) return nullptr;
    if (api_.takes_one_sided_windows()) return group_->make_slot(use, bytes);
    warn_once(fmt::format("symmetric memory does nothing with NCCL {}, which uses it only where a collective's input and "
                          "output both lie in it, and parameters and gradients do not; NCCL 2.29 does not ask for that",
                          api_.version()));
    return nullptr;
  }

  void abort(const std::string& reason) override { group_->fail(reason); }
  std::shared_ptr<NoticeBoard> notice_board() override { return config_.notices; }
  std::shared_ptr<GroupPlace> place() override { return config_.place; }

 private:
  using Enqueue = std::function<ncclResult_t(ncclComm_t comm, StreamHandle stream)>;

  std::shared_ptr<Work> launch(NcclChannel& channel, const char* operation, std::string_view subject,
                               Tensors tensors, int64_t bytes, Enqueue enqueue) {
    CollectiveInfo info(operation, subject, *this, bytes);
    return group_->launch(channel, {std::move(info), std::move(tensors), std::move(enqueue)});
  }

  std::shared_ptr<Work> reduce_scatter(std::span<const at::Tensor> outputs, std::span<const at::Tensor> inputs,
                                       const Reduction& how, std::string_view subject) {
    checks::reduce_scatter_batch(*this, outputs, inputs, subject);
    for (const at::Tensor& input : inputs) check_reduction(input, how, "reduce_scatter", subject);
    return launch(group_->reductions(), "reduce_scatter", subject, joined(outputs, inputs), total_bytes(inputs),
                  [&](ncclComm_t comm, StreamHandle stream) {
                    ncclResult_t result = ncclSuccess;
                    for (size_t i = 0; i < outputs.size() && result == ncclSuccess; ++i) {
                      const at::Tensor& output = outputs[i];
                      if (output.numel() == 0) continue;
                      result = with_op(output, how, comm, [&](ncclDataType_t dtype, ncclRedOp_t op) {
                        return api_.reduce_scatter(inputs[i].const_data_ptr(), output.mutable_data_ptr(),
                                                   output.numel(), dtype, op, comm, stream);
                      });
                    }
                    return result;
                  });
  }

  std::shared_ptr<Work> all_reduce(const at::Tensor& tensor, const Reduction& how, std::string_view subject) {
    checks::all_reduce(*this, tensor, subject);
    check_reduction(tensor, how, "all_reduce", subject);
    return launch(group_->reductions(), "all_reduce", subject, {tensor}, total_bytes({&tensor, 1}),
                  [&](ncclComm_t comm, StreamHandle stream) {
                    return with_op(tensor, how, comm, [&](ncclDataType_t dtype, ncclRedOp_t op) {
                      return api_.all_reduce(tensor.const_data_ptr(), tensor.mutable_data_ptr(), tensor.numel(),
                                             dtype, op, comm, stream);
                    });
                  });
  }

  void check_reduction(const at::Tensor& tensor, const Reduction& how, const char* operation,
                       std::string_view subject) const {
    (void)dtype_to_reduce(tensor, operation, subject);
    require(!how.scale || nccl_scales_sums(tensor.scalar_type()),
            "{} of '{}' in group '{}': sums of {} cannot be scaled; ask scaled_sums_of() first", operation, subject,
            name(), c10::toString(tensor.scalar_type()));
  }

  template <class Call>
  ncclResult_t with_op(const at::Tensor& tensor, const Reduction& how, ncclComm_t comm, const Call& call) const {
    const ncclDataType_t dtype = dtype_to_reduce(tensor, "reduction", name());
    if (!how.scale) return call(dtype, nccl_op(how.op));
    if (is_average(*how.scale, *this)) return call(dtype, ncclAvg);
    const NcclScaledSum sum(api_, *how.scale, dtype, comm);
    return call(dtype, sum.op());
  }

  const NcclGroupConfig config_;
  const c10::Device device_;
  const NcclApi& api_;
  std::shared_ptr<NcclGroup> group_;
  std::shared_ptr<NcclWatchdog> watchdog_;  // one for the world and all that is split off
  int splits_ = 0;
};

}  // namespace

std::shared_ptr<Communicator> make_nccl_communicator(NcclWorld world) {
  require(world.store != nullptr, "make_nccl_communicator: expected a store, found none");
  if (!world.streams) {
    require(has_nccl(/*devices=*/1), "backend nccl: this process sees no CUDA device; use backend gloo");
    world.streams = cuda_streams({c10::DeviceType::CUDA, c10::cuda::current_device()});
  }
  const NcclApi& api = world.api != nullptr ? *world.api : nccl_api();
  order_nccl_launches(api);
  const NcclGroupConfig config{.name = "world",
                               .rank = world.rank,
                               .size = world.size,
                               .key = "world",
                               .store = world.store,
                               .notices = store_notice_board(world.store),
                               .api = &api,
                               .streams = world.streams,
                               .timeout = world.timeout,
                               .watch_interval = world.watch_interval,
                               .gathers_cta_policy = gathers_cta_policy(api, world.use_copy_engine_all_gather)};
  std::vector<int> ranks(world.size);
  std::iota(ranks.begin(), ranks.end(), 0);
  return std::make_shared<NcclCommunicator>(config, std::move(ranks),
                                            std::make_shared<NcclWatchdog>(world.watch_interval));
}

}  // namespace fsdp
