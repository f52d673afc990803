#include "comm/single_rank.hpp"

#include <mutex>

#include "comm/checks.hpp"
#include "comm/failure_flag.hpp"
#include "comm/threads/local_reduce.hpp"
#include "comm/work.hpp"
#include "fsdp/process_group.hpp"

namespace fsdp {
namespace {

using checks::Devices;

/// All pieces are its own: a gather or a reduction is a copy, or nothing where output is input.
class SingleRank final : public Communicator {
 public:
  SingleRank(std::vector<int> ranks, std::string name, c10::DeviceType device_type)
      : Communicator(0, std::move(ranks), std::move(name)), device_type_(device_type) {}

  c10::DeviceType device_type() const override { return device_type_; }
  std::string backend() const override { return "single"; }
  bool launches_batches() const override { return true; }

  std::shared_ptr<Work> start_all_gather(const at::Tensor& output, const at::Tensor& input,
                                         std::string_view subject) override {
    checks::all_gather(*this, output, input, subject, Devices::kAny);
    failure_.check("all_gather", subject, *this);
    copy_elements(output, input);
    return completed_work();
  }

  std::shared_ptr<Work> start_reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                                             ReduceOp /*op*/, std::string_view subject) override {
    checks::reduce_scatter(*this, output, input, subject, Devices::kAny);
    failure_.check("reduce_scatter", subject, *this);
    copy_elements(output, input);
    return completed_work();
  }

  std::shared_ptr<Work> start_all_reduce(const at::Tensor& tensor, ReduceOp /*op*/,
                                         std::string_view subject) override {
    checks::all_reduce(*this, tensor, subject, Devices::kAny);
    failure_.check("all_reduce", subject, *this);
    return completed_work();
  }

  std::shared_ptr<Work> start_broadcast(const at::Tensor& tensor, int root,
                                        std::string_view subject) override {
    checks::broadcast(*this, tensor, root, subject, Devices::kAny);
    failure_.check("broadcast", subject, *this);
    return completed_work();
  }

  std::shared_ptr<Work> start_all_gather_batch(std::span<const at::Tensor> outputs,
                                               std::span<const at::Tensor> inputs,
                                               std::string_view subject) override {
    checks::all_gather_batch(*this, outputs, inputs, subject, Devices::kAny);
    failure_.check("all_gather", subject, *this);
    for (size_t i = 0; i < outputs.size(); ++i) copy_elements(outputs[i], inputs[i]);
    return completed_work();
  }

  std::shared_ptr<Work> start_reduce_scatter_batch(std::span<const at::Tensor> outputs,
                                                   std::span<const at::Tensor> inputs,
                                                   ReduceOp /*op*/,
                                                   std::string_view subject) override {
    checks::reduce_scatter_batch(*this, outputs, inputs, subject, Devices::kAny);
    failure_.check("reduce_scatter", subject, *this);
    for (size_t i = 0; i < outputs.size(); ++i) copy_elements(outputs[i], inputs[i]);
    return completed_work();
  }

  std::shared_ptr<Communicator> split(std::span<const int> ranks,
                                      const std::string& name) override {
    SplitPlan plan = plan_split(*this, ranks, name);
    return std::make_shared<SingleRank>(std::move(plan.world_ranks), std::move(plan.name),
                                        device_type_);
  }

  void abort(const std::string& reason) override { failure_.set(reason); }

 private:
  c10::DeviceType device_type_;
  FailureFlag failure_;
};

}  // namespace

std::shared_ptr<Communicator> single_rank_on(c10::DeviceType device_type) {
  return std::make_shared<SingleRank>(std::vector<int>{0}, "world", device_type);
}

std::shared_ptr<Communicator> single_rank() { return single_rank_on(c10::DeviceType::CPU); }

}  // namespace fsdp
