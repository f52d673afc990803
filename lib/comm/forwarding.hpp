#pragma once

#include "comm/comm_memory.hpp"
#include "comm/notice_board.hpp"
#include "comm/scaled_sum.hpp"
#include "comm/watch/group_place.hpp"

namespace fsdp {

/// A communicator that does what another one does, which it keeps alive. Others derive from it and change
/// what they are for; each says what becomes of the groups that are split off.
class ForwardingCommunicator : public Communicator,
                               public HasNoticeBoard,
                               public HasCommMemory,
                               public HasScaledSums {
 public:
  c10::DeviceType device_type() const override { return inner_->device_type(); }
  c10::DeviceIndex device_index() const override { return inner_->device_index(); }
  std::string backend() const override { return inner_->backend(); }
  bool launches_batches() const override { return inner_->launches_batches(); }
  int64_t packs_below() const override { return inner_->packs_below(); }
  bool waits_in_streams() const override { return inner_->waits_in_streams(); }

  std::shared_ptr<Work> start_all_gather(const at::Tensor& output, const at::Tensor& input,
                                         std::string_view subject) override {
    return inner_->start_all_gather(output, input, subject);
  }
  std::shared_ptr<Work> start_reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op,
                                             std::string_view subject) override {
    return inner_->start_reduce_scatter(output, input, op, subject);
  }
  std::shared_ptr<Work> start_all_reduce(const at::Tensor& tensor, ReduceOp op, std::string_view subject) override {
    return inner_->start_all_reduce(tensor, op, subject);
  }
  std::shared_ptr<Work> start_broadcast(const at::Tensor& tensor, int root, std::string_view subject) override {
    return inner_->start_broadcast(tensor, root, subject);
  }
  std::shared_ptr<Work> start_all_gather_batch(std::span<const at::Tensor> outputs,
                                               std::span<const at::Tensor> inputs,
                                               std::string_view subject) override {
    return inner_->start_all_gather_batch(outputs, inputs, subject);
  }
  std::shared_ptr<Work> start_reduce_scatter_batch(std::span<const at::Tensor> outputs,
                                                   std::span<const at::Tensor> inputs, ReduceOp op,
                                                   std::string_view subject) override {
    return inner_->start_reduce_scatter_batch(outputs, inputs, op, subject);
  }

  bool scales_sums(const ScaledSum& sum) const override { return scaled_sums_of(*inner_, sum) != nullptr; }
  std::shared_ptr<Work> start_scaled_reduce_scatter(std::span<const at::Tensor> outputs,
                                                    std::span<const at::Tensor> inputs, double scale,
                                                    std::string_view subject) override {
    return dynamic_cast<HasScaledSums&>(*inner_).start_scaled_reduce_scatter(outputs, inputs, scale, subject);
  }
  std::shared_ptr<Work> start_scaled_all_reduce(const at::Tensor& tensor, double scale,
                                                std::string_view subject) override {
    return dynamic_cast<HasScaledSums&>(*inner_).start_scaled_all_reduce(tensor, scale, subject);
  }

  void abort(const std::string& reason) override { inner_->abort(reason); }
  std::shared_ptr<NoticeBoard> notice_board() override { return notice_board_of(*inner_); }
  std::shared_ptr<GroupPlace> place() override { return place_of(*inner_); }
  at::Tensor allocate_for_comm(int64_t numel, const at::TensorOptions& options) override {
    return fsdp::allocate_for_comm(*inner_, numel, options);
  }
  std::string why_no_slots() const override { return fsdp::why_no_slots(*inner_); }
  std::shared_ptr<SymmMemBuffer> make_slot(SlotUse use, int64_t bytes) override {
    return fsdp::make_slot(*inner_, use, bytes);
  }

 protected:
  explicit ForwardingCommunicator(std::shared_ptr<Communicator> inner)
      : Communicator(inner->rank(), inner->ranks(), inner->name()), inner_(std::move(inner)) {}
  Communicator& inner() const { return *inner_; }

 private:
  std::shared_ptr<Communicator> inner_;
};

}  // namespace fsdp
