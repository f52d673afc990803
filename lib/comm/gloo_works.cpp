#include "comm/gloo_works.hpp"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>

#include <algorithm>

#include "comm/local_reduce.hpp"
#include "fsdp/error.hpp"

namespace fsdp {
namespace {

/// Large enough that a message's fixed cost does not show, small enough to be still in the cache
/// when it is added.
constexpr int64_t kChunkBytes = 1 << 20;
constexpr int64_t kChunksInFlight = 4;

using Messages = std::vector<c10::intrusive_ptr<c10d::Work>>;

}  // namespace

GlooExchange::GlooExchange(const WorkPlace& place, PeerLinks& links, const at::Tensor& output,
                           const at::Tensor& input, c10d::OpType type, const char* title)
    : AsyncWork(place.context, {{output}}, type, place.sequence, place.timeout, title,
                std::vector<at::Tensor>{input}),
      place_(place),
      output_(piece_of(output, 0, 1)),
      input_(piece_of(input, 0, 1)),
      links_(links) {}

void GlooExchange::send(const at::Tensor& tensor, int to) {
  auto message = links_.send_to(tensor, to, place_.tag);
  sends_.push_back(message);
  std::lock_guard lock(mutex_);
  if (stopped_) message->abort();
  started_.push_back(std::move(message));
}

c10::intrusive_ptr<c10d::Work> GlooExchange::receive(const at::Tensor& tensor, int from) {
  auto message = links_.receive_from(tensor, from, place_.tag);
  std::lock_guard lock(mutex_);
  if (stopped_) message->abort();
  started_.push_back(message);
  return message;
}

void GlooExchange::wait_for(const c10::intrusive_ptr<c10d::Work>& message) {
  // False: `stop` was called.
  if (!message->wait(place_.timeout)) throw CommError("aborted");
}

void GlooExchange::wait_for_sends() {
  for (const auto& message : sends_) wait_for(message);
}

void GlooExchange::stop() {
  std::lock_guard lock(mutex_);
  stopped_ = true;
  for (const auto& message : started_) message->abort();
}

GlooAllGather::GlooAllGather(const WorkPlace& place, PeerLinks& links, const at::Tensor& output,
                             const at::Tensor& input)
    : GlooExchange(place, links, output, input, c10d::OpType::_ALLGATHER_BASE, "gloo:all_gather") {}

void GlooAllGather::post() {
  for (int step = 1; step < place_.size; ++step) {
    const int from = peer(place_.size - step);
    receives_.push_back(receive(piece_of(output_, from, place_.size), from));
  }
  for (int step = 1; step < place_.size; ++step) send(input_, peer(step));
}

void GlooAllGather::run() {
  copy_to_piece(output_, place_.rank, input_);
  for (const auto& message : receives_) wait_for(message);
  wait_for_sends();
}

GlooReduceScatter::GlooReduceScatter(const WorkPlace& place, PeerLinks& links,
                                     const at::Tensor& output, const at::Tensor& input, ReduceOp op)
    : GlooExchange(place, links, output, input, c10d::OpType::_REDUCE_SCATTER_BASE,
                   "gloo:reduce_scatter"),
      op_(op) {
  const int64_t numel = output_.numel();
  chunk_numel_ = std::min(numel, kChunkBytes / static_cast<int64_t>(output_.element_size()));
  chunks_ = (numel + chunk_numel_ - 1) / chunk_numel_;
}

GlooReduceScatter::Range GlooReduceScatter::chunk(int64_t index) const {
  const int64_t start = index * chunk_numel_;
  return {start, std::min(chunk_numel_, output_.numel() - start)};
}

void GlooReduceScatter::post() {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const int64_t in_flight = std::min(kChunksInFlight, chunks_);
  arrivals_ = at::empty({in_flight, place_.size - 1, chunk_numel_}, output_.options());
  receives_.assign(in_flight, Messages(place_.size - 1));
  for (int64_t index = 0; index < in_flight; ++index) post_receives(index);
  for (int64_t index = 0; index < chunks_; ++index) {
    const auto [start, numel] = chunk(index);
    for (int step = 1; step < place_.size; ++step) {
      const int to = peer(step);
      send(piece_of(input_, to, place_.size).narrow(0, start, numel), to);
    }
  }
}

void GlooReduceScatter::post_receives(int64_t index) {
  const auto slot = index % static_cast<int64_t>(receives_.size());
  for (int step = 1; step < place_.size; ++step)
    receives_[slot][step - 1] = receive(
        arrivals_.select(0, slot).select(0, step - 1).narrow(0, 0, chunk(index).numel), peer(step));
}

void GlooReduceScatter::add_up(int64_t index) {
  const auto slot = index % static_cast<int64_t>(receives_.size());
  const auto [start, numel] = chunk(index);
  std::vector<at::Tensor> pieces(place_.size);
  pieces[place_.rank] = piece_of(input_, place_.rank, place_.size).narrow(0, start, numel);
  for (int step = 1; step < place_.size; ++step)
    pieces[peer(step)] = arrivals_.select(0, slot).select(0, step - 1).narrow(0, 0, numel);
  reduce_in_order(output_.narrow(0, start, numel), pieces, op_);
}

void GlooReduceScatter::run() {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (int64_t index = 0; index < chunks_; ++index) {
    for (const auto& message : receives_[index % receives_.size()]) wait_for(message);
    add_up(index);
    const int64_t next = index + static_cast<int64_t>(receives_.size());
    if (next < chunks_) post_receives(next);
  }
  wait_for_sends();
}

}  // namespace fsdp
