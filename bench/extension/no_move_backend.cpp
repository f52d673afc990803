#include "extension/no_move_backend.hpp"

namespace fsdp::bench {
namespace {

class DoneWork : public c10d::Work {
 public:
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override { return true; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::NoneType::get());
    future->markCompleted();
    return future;
  }
};

c10::intrusive_ptr<c10d::Work> done() { return c10::make_intrusive<DoneWork>(); }

}  // namespace

c10::intrusive_ptr<c10d::Work> NoMoveBackend::broadcast(std::vector<at::Tensor>&,
                                                        const c10d::BroadcastOptions&) {
  return done();
}

c10::intrusive_ptr<c10d::Work> NoMoveBackend::allreduce(std::vector<at::Tensor>&,
                                                        const c10d::AllreduceOptions&) {
  return done();
}

c10::intrusive_ptr<c10d::Work> NoMoveBackend::allgather(std::vector<std::vector<at::Tensor>>&,
                                                        std::vector<at::Tensor>&,
                                                        const c10d::AllgatherOptions&) {
  return done();
}

c10::intrusive_ptr<c10d::Work> NoMoveBackend::_allgather_base(at::Tensor&, at::Tensor&,
                                                              const c10d::AllgatherOptions&) {
  return done();
}

c10::intrusive_ptr<c10d::Work> NoMoveBackend::_reduce_scatter_base(
    at::Tensor&, at::Tensor&, const c10d::ReduceScatterOptions&) {
  return done();
}

c10::intrusive_ptr<c10d::Work> NoMoveBackend::barrier(const c10d::BarrierOptions&) {
  return done();
}

}  // namespace fsdp::bench
