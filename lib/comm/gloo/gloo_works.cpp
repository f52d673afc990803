#include "comm/gloo/gloo_works.hpp"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>

#include <fmt/format.h>

#include <algorithm>
#include <exception>

#include "comm/c10d/transport_error.hpp"
#include "comm/threads/local_reduce.hpp"
#include "fsdp/error.hpp"

namespace fsdp {
namespace {

constexpr size_t kChunksInFlight = 4;

/// Large enough that a message's fixed cost does not show, small enough to be still in the cache
/// when it is added; and what is in flight from all peers stays small beside a group's gradients.
int64_t chunk_bytes(int world_size) {
  constexpr int64_t kInFlight = 512 << 10, kSmallest = 32 << 10;
  const int64_t peers = std::max(1, world_size - 1);
  return std::max(kSmallest, kInFlight / (static_cast<int64_t>(kChunksInFlight) * peers));
}

std::vector<at::Tensor> flat(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> views;
  for (const auto& tensor : tensors) views.push_back(piece_of(tensor, 0, 1));
  return views;
}

/// What `body` returns. Its error gets the peer, which gloo names by an address at best.
template <class Body>
auto naming_peer(const char* direction, int peer, const Body& body) {
  try {
    return body();
  } catch (const std::exception& error) {
    throw CommError(fmt::format("{} rank {}: {}", direction, peer, transport_error(error.what())));
  }
}

}  // namespace

GlooExchange::GlooExchange(const WorkPlace& place, PeerLinks& links, const Tensors& outputs,
                           const Tensors& inputs, c10d::OpType type, const char* title)
    : AsyncWork(place.context, {}, type, place.sequence, place.timeout, title, std::nullopt),
      place_(place),
      outputs_(flat(outputs)),
      inputs_(flat(inputs)),
      links_(links) {}

void GlooExchange::send(const at::Tensor& tensor, int to) {
  auto message = naming_peer("to", to, [&] { return links_.send_to(tensor, to, place_.tag); });
  sends_.push_back({message, to});
  std::lock_guard lock(mutex_);
  if (stopped_) message->abort();
  started_.push_back(std::move(message));
}

GlooExchange::Message GlooExchange::receive(const at::Tensor& tensor, int from) {
  auto message = naming_peer("from", from, [&] { return links_.receive_from(tensor, from, place_.tag); });
  std::lock_guard lock(mutex_);
  if (stopped_) message->abort();
  started_.push_back(message);
  return {std::move(message), from};
}

void GlooExchange::wait_for(const Message& message, const char* direction) {
  {
    std::lock_guard lock(mutex_);
    waits_for_.begin(*message.work, message.peer);
  }
  naming_peer(direction, message.peer, [&] {
    const bool is_done = message.work->wait(place_.timeout);
    std::lock_guard lock(mutex_);
    if (waits_for_.end()) throw CommError("the connection ended in the middle of a message");
    if (!is_done) throw CommError("aborted");
  });
}

void GlooExchange::wait_for_sends() {
  for (const auto& message : sends_) wait_for(message, "to");
}

GlooExchange::~GlooExchange() { std::lock_guard lock(mutex_); }

void GlooExchange::start() {
  post();
  std::lock_guard lock(mutex_);
}

void GlooExchange::run() {
  { std::lock_guard lock(mutex_); }
  struct Finish {
    GlooExchange& work;
    ~Finish() {
      work.drop_tensors();
      work.links_.note_finished(work);
    }
  } finish{*this};
  exchange();
}

bool GlooExchange::wait(std::chrono::milliseconds timeout) {
  try {
    return AsyncWork::wait(timeout);
  } catch (...) {
    std::lock_guard lock(mutex_);
    throw;
  }
}

void GlooExchange::drop_tensors() {
  outputs_.clear();
  inputs_.clear();
  sends_.clear();
  std::lock_guard lock(mutex_);
  waits_for_.end();
  started_.clear();
}

void GlooExchange::stop() {
  std::lock_guard lock(mutex_);
  stopped_ = true;
  for (const auto& message : started_) message->abort();
}

void GlooExchange::stop_if_stuck(const std::function<bool(int peer, int tag)>& is_gone) {
  std::lock_guard lock(mutex_);
  waits_for_.abort_if_stuck([&](int peer) { return is_gone(peer, place_.tag); });
}

GlooAllGather::GlooAllGather(const WorkPlace& place, PeerLinks& links, const Tensors& outputs,
                             const Tensors& inputs)
    : GlooExchange(place, links, outputs, inputs, c10d::OpType::_ALLGATHER_BASE,
                   "gloo:all_gather") {}

void GlooAllGather::post() {
  for (int step = 1; step < place_.size; ++step) {
    const int from = peer(place_.size - step);
    for (const auto& output : outputs_)
      receives_.push_back(receive(piece_of(output, from, place_.size), from));
  }
  for (int step = 1; step < place_.size; ++step)
    for (const auto& input : inputs_) send(input, peer(step));
}

void GlooAllGather::drop_tensors() {
  receives_.clear();
  GlooExchange::drop_tensors();
}

void GlooAllGather::exchange() {
  for (size_t i = 0; i < outputs_.size(); ++i) copy_to_piece(outputs_[i], place_.rank, inputs_[i]);
  for (const auto& message : receives_) wait_for(message);
  wait_for_sends();
}

GlooReduceScatter::GlooReduceScatter(const WorkPlace& place, PeerLinks& links,
                                     const Tensors& outputs, const Tensors& inputs, ReduceOp op)
    : GlooExchange(place, links, outputs, inputs, c10d::OpType::_REDUCE_SCATTER_BASE,
                   "gloo:reduce_scatter"),
      op_(op) {
  const int64_t longest = chunk_bytes(place_.size) / static_cast<int64_t>(outputs_[0].element_size());
  for (size_t i = 0; i < outputs_.size(); ++i)
    for (int64_t start = 0; start < outputs_[i].numel(); start += longest)
      chunks_.push_back({i, start, std::min(longest, outputs_[i].numel() - start)});
}

at::Tensor GlooReduceScatter::own_part(const Chunk& chunk, int of_rank) const {
  return piece_of(inputs_[chunk.tensor], of_rank, place_.size)
      .narrow(0, chunk.start, chunk.numel);
}

at::Tensor GlooReduceScatter::arrival(size_t index, int step) const {
  return arrivals_.select(0, static_cast<int64_t>(index % receives_.size()))
      .select(0, step - 1)
      .narrow(0, 0, chunks_[index].numel);
}

void GlooReduceScatter::post() {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const size_t in_flight = std::min(kChunksInFlight, chunks_.size());
  const auto longest = std::max_element(chunks_.begin(), chunks_.end(), [](auto& a, auto& b) {
    return a.numel < b.numel;
  });
  arrivals_ = at::empty({static_cast<int64_t>(in_flight), place_.size - 1, longest->numel},
                        outputs_[0].options());
  receives_.assign(in_flight, std::vector<Message>(place_.size - 1));
  for (size_t index = 0; index < in_flight; ++index) post_receives(index);
  for (const auto& chunk : chunks_)
    for (int step = 1; step < place_.size; ++step)
      send(own_part(chunk, peer(step)), peer(step));
}

void GlooReduceScatter::post_receives(size_t index) {
  for (int step = 1; step < place_.size; ++step)
    receives_[index % receives_.size()][step - 1] = receive(arrival(index, step), peer(step));
}

void GlooReduceScatter::add_up(size_t index) {
  const auto& chunk = chunks_[index];
  std::vector<at::Tensor> pieces(place_.size);
  pieces[place_.rank] = own_part(chunk, place_.rank);
  for (int step = 1; step < place_.size; ++step) pieces[peer(step)] = arrival(index, step);
  reduce_in_order(outputs_[chunk.tensor].narrow(0, chunk.start, chunk.numel), pieces, op_);
}

void GlooReduceScatter::drop_tensors() {
  receives_.clear();
  arrivals_.reset();
  GlooExchange::drop_tensors();
}

void GlooReduceScatter::exchange() {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (size_t index = 0; index < chunks_.size(); ++index) {
    for (const auto& message : receives_[index % receives_.size()]) wait_for(message);
    add_up(index);
    const size_t next = index + receives_.size();
    if (next < chunks_.size()) post_receives(next);
  }
  wait_for_sends();
}

}  // namespace fsdp
