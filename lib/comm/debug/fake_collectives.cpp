#include "comm/debug/fake_collectives.hpp"

#include <fmt/format.h>

#include "base/environment.hpp"
#include "base/log.hpp"
#include "comm/forwarding.hpp"
#include "fsdp/simulated_network.hpp"

namespace fsdp {

namespace {

class LeftOutCommunicator final : public ForwardingCommunicator {
 public:
  LeftOutCommunicator(std::shared_ptr<Communicator> inner, bool gathers, bool reduces)
      : ForwardingCommunicator(std::move(inner)),
        free_(simulated_network({.world_size = size(), .rank = rank(), .launches_batches = launches_batches()})),
        gather_(gathers ? *free_ : this->inner()),
        reduce_(reduces ? *free_ : this->inner()),
        gathers_(gathers),
        reduces_(reduces) {}

  std::shared_ptr<Work> start_all_gather(const at::Tensor& output, const at::Tensor& input,
                                         std::string_view subject) override {
    return gather_.start_all_gather(output, input, subject);
  }
  std::shared_ptr<Work> start_all_gather_batch(std::span<const at::Tensor> outputs,
                                               std::span<const at::Tensor> inputs,
                                               std::string_view subject) override {
    return gather_.start_all_gather_batch(outputs, inputs, subject);
  }
  std::shared_ptr<Work> start_reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                                             ReduceOp op, std::string_view subject) override {
    return reduce_.start_reduce_scatter(output, input, op, subject);
  }
  std::shared_ptr<Work> start_reduce_scatter_batch(std::span<const at::Tensor> outputs,
                                                   std::span<const at::Tensor> inputs, ReduceOp op,
                                                   std::string_view subject) override {
    return reduce_.start_reduce_scatter_batch(outputs, inputs, op, subject);
  }
  std::shared_ptr<Work> start_all_reduce(const at::Tensor& tensor, ReduceOp op,
                                         std::string_view subject) override {
    return reduce_.start_all_reduce(tensor, op, subject);
  }
  std::shared_ptr<Work> start_scaled_reduce_scatter(std::span<const at::Tensor> outputs,
                                                    std::span<const at::Tensor> inputs,
                                                    double scale,
                                                    std::string_view subject) override {
    if (reduces_) return reduce_.start_reduce_scatter_batch(outputs, inputs, ReduceOp::kSum, subject);
    return ForwardingCommunicator::start_scaled_reduce_scatter(outputs, inputs, scale, subject);
  }
  std::shared_ptr<Work> start_scaled_all_reduce(const at::Tensor& tensor, double scale,
                                                std::string_view subject) override {
    if (reduces_) return reduce_.start_all_reduce(tensor, ReduceOp::kSum, subject);
    return ForwardingCommunicator::start_scaled_all_reduce(tensor, scale, subject);
  }

  std::shared_ptr<Communicator> split(std::span<const int> ranks,
                                      const std::string& name) override {
    auto group = inner().split(ranks, name);
    if (!group) return nullptr;
    return std::make_shared<LeftOutCommunicator>(std::move(group), gathers_, reduces_);
  }

 private:
  std::shared_ptr<Communicator> free_;
  Communicator &gather_, &reduce_;  // each that one or the inner
  bool gathers_, reduces_;
};

}  // namespace

std::shared_ptr<Communicator> with_fake_collectives(std::shared_ptr<Communicator> group) {
  const bool gathers = environment::fakes_all_gather(), reduces = environment::fakes_reduce();
  if (!group || group->size() == 1 || (!gathers && !reduces)) return group;
  warn_once(fmt::format("{}{}{} set: collectives are left out to show what they cost; results are "
                        "wrong",
                        gathers ? "FSDP_FAKE_ALL_GATHER" : "", gathers && reduces ? " and " : "",
                        reduces ? "FSDP_FAKE_REDUCE" : ""));
  return std::make_shared<LeftOutCommunicator>(std::move(group), gathers, reduces);
}

}  // namespace fsdp
