#pragma once

#include <fmt/format.h>

#include <fsdp/communicator.hpp>
#include <fsdp/error.hpp>
#include <numeric>
#include <string>
#include <vector>

namespace fsdp::test {

/// One rank of a world that writes down which groups are made and refuses to communicate, so that one
/// thread can play every rank in turn.
class SplitLog final : public Communicator {
 public:
  using Log = std::vector<std::string>;

  static std::shared_ptr<SplitLog> world(int rank, int world_size) {
    std::vector<int> ranks(world_size);
    std::iota(ranks.begin(), ranks.end(), 0);
    return std::make_shared<SplitLog>(rank, std::move(ranks), "world", std::make_shared<Log>());
  }

  SplitLog(int rank, std::vector<int> ranks, std::string name, std::shared_ptr<Log> log)
      : Communicator(rank, std::move(ranks), std::move(name)), log_(std::move(log)) {}

  /// "world: shard[0,1]" for each group made out of this one or of what was split from it.
  const Log& splits() const { return *log_; }

  std::string backend() const override { return "split log"; }
  std::shared_ptr<Work> start_all_gather(const at::Tensor&, const at::Tensor&, std::string_view subject) override {
    return refuse(subject);
  }
  std::shared_ptr<Work> start_reduce_scatter(const at::Tensor&, const at::Tensor&, ReduceOp,
                                             std::string_view subject) override {
    return refuse(subject);
  }
  std::shared_ptr<Work> start_all_reduce(const at::Tensor&, ReduceOp, std::string_view subject) override {
    return refuse(subject);
  }
  std::shared_ptr<Work> start_broadcast(const at::Tensor&, int, std::string_view subject) override {
    return refuse(subject);
  }
  void abort(const std::string&) override {}

  std::shared_ptr<Communicator> split(std::span<const int> members, const std::string& name) override {
    int own = -1;
    std::vector<int> world_ranks;
    for (const int member : members) {
      if (member == rank()) own = static_cast<int>(world_ranks.size());
      world_ranks.push_back(ranks()[member]);
    }
    const std::string full_name = fmt::format("{}[{}]", name, fmt::join(world_ranks, ","));
    log_->push_back(this->name() + ": " + full_name);
    if (own < 0) return nullptr;
    return std::make_shared<SplitLog>(own, world_ranks, full_name, log_);
  }

 private:
  [[noreturn]] std::shared_ptr<Work> refuse(std::string_view subject) const {
    throw CommError(fmt::format("a test that must not communicate did, for '{}'", subject));
  }

  std::shared_ptr<Log> log_;
};

}  // namespace fsdp::test
