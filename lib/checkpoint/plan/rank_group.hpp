#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "fsdp/communicator.hpp"

namespace fsdp {

/// Lets the ranks of a checkpoint talk to each other: small texts and numbers, and whether all is well.
class RankGroup {
 public:
  /// world: null for the process's default one, or this rank alone if there is none.
  /// caller: outlives this; the user's call, which other ranks are told if they are late.
  RankGroup(std::shared_ptr<Communicator> world, const char* caller);

  const std::shared_ptr<Communicator>& world() const { return world_; }
  int rank() const { return world_->rank(); }
  int size() const { return world_->size(); }
  bool is_first() const { return rank() == 0; }

  // Collective calls.
  std::vector<std::string> all_gather(const std::string& text) const;
  /// Returns every rank's text, or nothing where all are the same. Hashes are compared first.
  std::vector<std::string> all_gather_different(const std::string& text) const;
  /// Returns every rank's numbers, of which all ranks have as many.
  std::vector<std::vector<int64_t>> all_gather(const std::vector<int64_t>& numbers) const;
  /// Returns the first rank's text.
  std::string broadcast(const std::string& text) const;
  /// bytes: 1-D, on the CPU; everybody gets the first rank's.
  void broadcast(const at::Tensor& bytes) const;

  /// Runs `body` on every rank, then tells all whether it went well for everybody: a collective call. If it threw
  /// anywhere, all ranks throw one error with what was wrong and where: a UsageError or StateError if all
  /// were, else a CheckpointError. `body` communicates nothing.
  void together(const std::function<void()>& body) const;
  /// Runs `body` as `together` does, and returns on every rank the numbers that it returned, by rank.
  std::vector<int64_t> together_with(const std::function<int64_t()>& body) const;
  /// Runs `body` on the first rank alone, as `together` does.
  void on_first(const std::function<void()>& body) const;

 private:
  /// Gathers texts whose lengths, `lengths`, every rank knows already.
  std::vector<std::string> all_gather(const std::string& text, const std::vector<int64_t>& lengths) const;

  std::shared_ptr<Communicator> world_;
  const char* caller_;
};

}  // namespace fsdp
