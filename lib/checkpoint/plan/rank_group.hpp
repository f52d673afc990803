#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "fsdp/communicator.hpp"

namespace fsdp {

/// What the ranks of a checkpoint say to each other: small texts and numbers, and whether all is well.
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
  /// Every rank's; none where all are the same. A hash travels first.
  std::vector<std::string> all_gather_different(const std::string& text) const;
  /// As many numbers on every rank.
  std::vector<std::vector<int64_t>> all_gather(const std::vector<int64_t>& numbers) const;
  /// The first rank's.
  std::string broadcast(const std::string& text) const;
  /// bytes: 1-D, on the CPU; everybody gets the first rank's.
  void broadcast(const at::Tensor& bytes) const;

  /// Runs `body` on every rank, then tells all whether it went well for everybody: a collective call. If it threw
  /// anywhere, all ranks throw one error with what was wrong and where: a UsageError or StateError if all
  /// were, else a CheckpointError. `body` communicates nothing.
  void together(const std::function<void()>& body) const;
  /// The same with a number from each rank, which all are given.
  std::vector<int64_t> together_with(const std::function<int64_t()>& body) const;
  /// The same where only the first rank has something to do.
  void on_first(const std::function<void()>& body) const;

 private:
  /// With the lengths of all, which everybody knows.
  std::vector<std::string> all_gather(const std::string& text, const std::vector<int64_t>& lengths) const;

  std::shared_ptr<Communicator> world_;
  const char* caller_;
};

}  // namespace fsdp
