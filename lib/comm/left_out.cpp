#include "comm/left_out.hpp"

#include <fmt/format.h>

#include "base/environment.hpp"
#include "base/log.hpp"
#include "comm/notice_board.hpp"
#include "fsdp/simulated_network.hpp"

namespace fsdp {

namespace {

class LeftOutCommunicator final : public Communicator, public HasNoticeBoard {
 public:
  LeftOutCommunicator(std::shared_ptr<Communicator> inner, bool gathers, bool reduces)
      : Communicator(inner->rank(), inner->ranks(), inner->name()),
        inner_(std::move(inner)),
        free_(simulated_network({.world_size = inner_->size(),
                                 .rank = inner_->rank(),
                                 .launches_batches = inner_->launches_batches()})),
        gather_(gathers ? *free_ : *inner_),
        reduce_(reduces ? *free_ : *inner_),
        gathers_(gathers),
        reduces_(reduces) {}

  c10::DeviceType device_type() const override { return inner_->device_type(); }
  std::string backend() const override { return inner_->backend(); }
  bool launches_batches() const override { return inner_->launches_batches(); }
  int64_t packs_below() const override { return inner_->packs_below(); }

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
  std::shared_ptr<Work> start_broadcast(const at::Tensor& tensor, int root,
                                        std::string_view subject) override {
    return inner_->start_broadcast(tensor, root, subject);
  }

  std::shared_ptr<Communicator> split(std::span<const int> ranks,
                                      const std::string& name) override {
    auto group = inner_->split(ranks, name);
    if (!group) return nullptr;
    return std::make_shared<LeftOutCommunicator>(std::move(group), gathers_, reduces_);
  }
  void abort(const std::string& reason) override { inner_->abort(reason); }
  std::shared_ptr<NoticeBoard> notice_board() override { return notice_board_of(*inner_); }

 private:
  std::shared_ptr<Communicator> inner_, free_;
  Communicator &gather_, &reduce_;  // each one of the two
  bool gathers_, reduces_;
};

}  // namespace

std::shared_ptr<Communicator> with_collectives_left_out(std::shared_ptr<Communicator> group) {
  const bool gathers = environment::fakes_all_gather(), reduces = environment::fakes_reduce();
  if (!group || group->size() == 1 || (!gathers && !reduces)) return group;
  warn_once(fmt::format("{}{}{} set: collectives are left out to show what they cost; results are "
                        "wrong",
                        gathers ? "FSDP_FAKE_ALL_GATHER" : "", gathers && reduces ? " and " : "",
                        reduces ? "FSDP_FAKE_REDUCE" : ""));
  return std::make_shared<LeftOutCommunicator>(std::move(group), gathers, reduces);
}

}  // namespace fsdp
