#include "comm/debug/late_delivery.hpp"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_like.h>

#include <thread>
#include <vector>

#include "comm/debug/poison.hpp"
#include "comm/forwarding.hpp"
#include "comm/threads/local_reduce.hpp"
#include "comm/work.hpp"

namespace fsdp {

namespace {

using Tensors = std::vector<at::Tensor>;
using Clock = std::chrono::steady_clock;

at::Tensor copy_of(const at::Tensor& tensor) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  auto copy = at::empty_like(tensor);
  copy_elements(copy, tensor);
  return copy;
}

/// What a collective is to leave where, once it is waited for.
struct Parcel {
  Tensors outputs = {}, arrived = {};  // where results belong, and where they are meanwhile
  Tensors inputs = {};                 // not to change before then
  std::vector<uint64_t> hashes = {};   // of those
};

Parcel parcel_of(std::span<const at::Tensor> outputs, std::span<const at::Tensor> inputs) {
  Parcel parcel{.outputs = {outputs.begin(), outputs.end()}, .inputs = {inputs.begin(), inputs.end()}};
  for (const auto& input : inputs) parcel.hashes.push_back(content_hash(input));
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (const auto& output : outputs) {
    parcel.arrived.push_back(at::empty_like(output));
    poison(output);
  }
  return parcel;
}

class LateWork final : public Work {
 public:
  LateWork(std::shared_ptr<Work> inner, Parcel parcel, CollectiveInfo info,
           std::shared_ptr<FaultLog> faults, std::chrono::microseconds delay)
      : inner_(std::move(inner)),
        parcel_(std::move(parcel)),
        info_(std::move(info)),
        faults_(std::move(faults)),
        delay_(delay),
        due_(Clock::now() + delay) {}

  void wait() override {
    inner_->wait();
    if (std::exchange(is_delivered_, true)) return;
    if (delay_.count() > 0) std::this_thread::sleep_for(delay_);
    deliver();
    parcel_ = {};
  }
  bool wait_briefly() override {
    if (!inner_->wait_briefly()) return false;
    wait();
    return true;
  }
  bool is_completed() override { return is_delivered_ || (Clock::now() >= due_ && inner_->is_completed()); }

 private:
  void deliver() {
    for (size_t i = 0; i < parcel_.inputs.size(); ++i)
      if (content_hash(parcel_.inputs[i]) != parcel_.hashes[i])
        faults_->add(info_.describe() + ": its input was changed before the collective was done");
    for (size_t i = 0; i < parcel_.outputs.size(); ++i) {
      if (first_written_byte(parcel_.outputs[i]))
        faults_->add(info_.describe() + ": its output was written before the collective was done");
      copy_elements(parcel_.outputs[i], parcel_.arrived[i]);
    }
  }

  std::shared_ptr<Work> inner_;
  Parcel parcel_;
  CollectiveInfo info_;
  std::shared_ptr<FaultLog> faults_;
  std::chrono::microseconds delay_;
  Clock::time_point due_;
  bool is_delivered_ = false;
};

class LateCommunicator final : public ForwardingCommunicator {
 public:
  LateCommunicator(std::shared_ptr<Communicator> inner, LateDelivery how)
      : ForwardingCommunicator(std::move(inner)), how_(std::move(how)) {}

  std::shared_ptr<Work> start_all_gather(const at::Tensor& output, const at::Tensor& input,
                                         std::string_view subject) override {
    return gather({&output, 1}, {&input, 1}, subject, [&](const Tensors& to, const Tensors& from) {
      return inner().start_all_gather(to[0], from[0], subject);
    });
  }
  std::shared_ptr<Work> start_all_gather_batch(std::span<const at::Tensor> outputs,
                                               std::span<const at::Tensor> inputs,
                                               std::string_view subject) override {
    return gather(outputs, inputs, subject, [&](const Tensors& to, const Tensors& from) {
      return inner().start_all_gather_batch(to, from, subject);
    });
  }
  std::shared_ptr<Work> start_reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                                             ReduceOp op, std::string_view subject) override {
    return reduce({&output, 1}, {&input, 1}, subject, [&](const Tensors& to, const Tensors& from) {
      return inner().start_reduce_scatter(to[0], from[0], op, subject);
    });
  }
  std::shared_ptr<Work> start_reduce_scatter_batch(std::span<const at::Tensor> outputs,
                                                   std::span<const at::Tensor> inputs, ReduceOp op,
                                                   std::string_view subject) override {
    return reduce(outputs, inputs, subject, [&](const Tensors& to, const Tensors& from) {
      return inner().start_reduce_scatter_batch(to, from, op, subject);
    });
  }
  std::shared_ptr<Work> start_scaled_reduce_scatter(std::span<const at::Tensor> outputs,
                                                    std::span<const at::Tensor> inputs, double scale,
                                                    std::string_view subject) override {
    return reduce(outputs, inputs, subject, [&](const Tensors& to, const Tensors& from) {
      return ForwardingCommunicator::start_scaled_reduce_scatter(to, from, scale, subject);
    });
  }
  std::shared_ptr<Work> start_all_reduce(const at::Tensor& tensor, ReduceOp op,
                                         std::string_view subject) override {
    return reduce_in_place(tensor, subject,
                           [&](const at::Tensor& sum) { return inner().start_all_reduce(sum, op, subject); });
  }
  std::shared_ptr<Work> start_scaled_all_reduce(const at::Tensor& tensor, double scale,
                                                std::string_view subject) override {
    return reduce_in_place(tensor, subject, [&](const at::Tensor& sum) {
      return ForwardingCommunicator::start_scaled_all_reduce(sum, scale, subject);
    });
  }

  std::shared_ptr<Communicator> split(std::span<const int> ranks, const std::string& name) override {
    return inner().split(ranks, name);
  }

 private:
  template <class Start>
  std::shared_ptr<Work> gather(std::span<const at::Tensor> outputs, std::span<const at::Tensor> inputs,
                               std::string_view subject, Start&& start) {
    Tensors sent(inputs.begin(), inputs.end());
    for (size_t i = 0; i < sent.size(); ++i)
      // A piece of its own output would be poisoned with it.
      if (sent[i].is_alias_of(outputs[i])) sent[i] = copy_of(sent[i]);
    auto parcel = parcel_of(outputs, sent);
    auto work = start(parcel.arrived, sent);
    return late("all_gather", subject, std::move(parcel), std::move(work));
  }

  /// The collective may overwrite its inputs: it gets copies, and the caller's are watched.
  template <class Start>
  std::shared_ptr<Work> reduce(std::span<const at::Tensor> outputs, std::span<const at::Tensor> inputs,
                               std::string_view subject, Start&& start) {
    auto parcel = parcel_of(outputs, inputs);
    Tensors sent;
    for (const auto& input : inputs) sent.push_back(copy_of(input));
    auto work = start(parcel.arrived, sent);
    return late("reduce_scatter", subject, std::move(parcel), std::move(work));
  }

  template <class Start>
  std::shared_ptr<Work> reduce_in_place(const at::Tensor& tensor, std::string_view subject, Start&& start) {
    const auto summed = copy_of(tensor);
    auto parcel = parcel_of({&tensor, 1}, {});
    parcel.arrived[0] = summed;
    auto work = start(summed);
    return late("all_reduce", subject, std::move(parcel), std::move(work));
  }

  std::shared_ptr<Work> late(const char* operation, std::string_view subject, Parcel parcel,
                             std::shared_ptr<Work> work) {
    int64_t bytes = 0;
    for (const auto& output : parcel.outputs) bytes += static_cast<int64_t>(output.nbytes());
    const auto delay = draw_delay(how_.random, how_.max_delay);
    return std::make_shared<LateWork>(std::move(work), std::move(parcel),
                                      CollectiveInfo(operation, subject, *this, bytes), how_.faults,
                                      delay);
  }

  LateDelivery how_;
};

}  // namespace

std::chrono::microseconds draw_delay(std::mt19937_64& random, std::chrono::microseconds most) {
  const uint64_t drawn = random();
  const auto choices = static_cast<uint64_t>(most.count()) + 1;
  return std::chrono::microseconds(drawn % 2 == 0 ? 0 : (drawn >> 1) % choices);
}

std::shared_ptr<Communicator> with_late_delivery(std::shared_ptr<Communicator> inner, LateDelivery how) {
  return std::make_shared<LateCommunicator>(std::move(inner), std::move(how));
}

}  // namespace fsdp
