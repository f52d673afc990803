#pragma once

#include <torch/torch.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <fsdp/fsdp.hpp>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "fsdp/testing/recording.hpp"
#include "support/patience.hpp"

namespace fsdp::test {

/// Its message, without the stack that LibTorch appends.
std::string message_of(const std::exception& error);

/// What the ranks of one `on_ranks` call found wrong. Catch2's assertions are not thread-safe, so ranks write here.
class Findings;

/// One rank of a world of threads, as a test's body sees it.
class Rank {
 public:
  Rank(std::shared_ptr<Communicator> world, std::shared_ptr<Findings> findings);

  int index() const { return world_->rank(); }
  int size() const { return world_->size(); }
  /// The world; every collective of it and of its splits is written into `log()`.
  const std::shared_ptr<Communicator>& world() const { return world_; }
  CallLog& log() const { return *log_; }
  /// All ranks in one dimension, "shard".
  const DeviceMesh& mesh() const { return mesh_; }
  /// ("replicate", "shard") of this shape.
  DeviceMesh hybrid(int64_t replicate, int64_t shard) const;

  void check(bool condition, const std::string& what) const;
  /// Of a DTensor, this rank's piece. Element by element within `relative` of the largest expected element. Undefined equals only undefined.
  void check_close(const at::Tensor& actual, const at::Tensor& expected, const std::string& what,
                   double relative = 1e-5) const;
  void check_identical(const at::Tensor& actual, const at::Tensor& expected, const std::string& what) const;

  template <class A, class B>
  void check_equal(const A& actual, const B& expected, const std::string& what) const {
    check(actual == expected, fmt::format("{}: expected {}, found {}", what, expected, actual));
  }

  /// `body` throws an Expected whose message contains every one of `parts`.
  template <class Expected, class Body>
  void check_throws(Body&& body, const std::vector<std::string>& parts, const std::string& what) const {
    try {
      body();
    } catch (const std::exception& error) {
      auto message = message_of(error);
      check(dynamic_cast<const Expected*>(&error) != nullptr,
            fmt::format("{}: another kind of error was thrown: {}", what, message));
      for (auto& part : parts)
        check(message.find(part) != std::string::npos,
              fmt::format("{}: the message should contain '{}', found: {}", what, part, message));
      return;
    }
    check(false, what + ": nothing was thrown");
  }

  /// The collectives since the last `clear`, as "operation subject", the root's subject spelled "root".
  std::vector<std::string> calls() const;
  /// Those of one operation only, such as "all_gather".
  std::vector<std::string> subjects_of(const std::string& operation) const;

 private:
  std::shared_ptr<Findings> findings_;
  std::shared_ptr<CallLog> log_;
  std::shared_ptr<Communicator> world_;
  DeviceMesh mesh_;
};

/// Runs `body` on `world_size` ranks and checks that none found anything wrong or threw, and that
/// every rank checked something. True if all was well. Where the ranks are processes (device_ranks.hpp) it runs on this
/// one's.
bool on_ranks(int world_size, const std::function<void(Rank&)>& body, const ThreadRanksOptions& options = {.timeout = patience()});

std::unique_lock<std::mutex> lock_default_generator();

/// Runs `make` with LibTorch's default generator seeded. Ranks that are threads share that
/// generator, so they take turns; `make` must therefore wait for no other rank.
template <class Make>
auto seeded(uint64_t seed, Make&& make) {
  auto lock = lock_default_generator();
  torch::manual_seed(seed);
  return make();
}

}  // namespace fsdp::test
