#pragma once

#include <algorithm>
#include <functional>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "property/plain_training.hpp"
#include "support/twin.hpp"

namespace fsdp::test {

/// Draws that are the same on every machine, which the standard's distributions do not promise.
class Draw {
 public:
  explicit Draw(uint64_t seed) : engine_(seed) {}
  /// A number in [low, high].
  int64_t number(int64_t low, int64_t high) { return low + static_cast<int64_t>(engine_() % (high - low + 1)); }
  bool chance(double probability) { return (engine_() >> 11) * 0x1.0p-53 < probability; }
  template <class T>
  T one_of(const std::vector<T>& choices) {
    return choices[number(0, static_cast<int64_t>(choices.size()) - 1)];
  }

 private:
  std::mt19937_64 engine_;
};

/// A part of a random model. Maps [batch, time, width] to the same shape.
struct Part {
  std::string kind;
  int64_t width = 4;
  int64_t inner = 4;         ///< hidden size, rows of an embedding...
  bool flag = false;         ///< bias, bidirectional...: what the kind makes of it
  int64_t skip_period = 0;   ///< 0: always used; n: left out when (step + micro-batch) % n == 0
  bool differs_by_rank = false;
  int64_t ranks = 1;  ///< experts: how many; columns: pieces that the whole is computed in, rounded like so many ranks
  int64_t ranks_of_each = 1;  ///< experts: that have the same one
  std::vector<Part> parts = {};
};

/// All that a draw decides; equal values build equal models on every rank.
struct RandomTree {
  Part root;
  Training training;
  double shard_probability = 0.4;
  double frozen_probability = 0;
  double ignored_probability = 0;  ///< of a parameter
  double offload_probability = 0;  ///< of a unit
  bool splits_ties = false;        ///< parts that share a parameter may be groups of their own
  bool root_is_sharded = true;
  double other_layout_probability = 0;  ///< of a unit to be cut along other dimensions, or flat
  bool explicit_prefetch = false;
  bool names_dims = false;   ///< beside tensor parallelism: dp_mesh_dims of the whole mesh say what is data parallel
  bool merges_dims = false;  ///< and two of them shard together
  double other_mesh_probability = 0;  ///< of a parameter to have a mesh of its own over the same ranks
  int64_t other_replicas = 0;         ///< that mesh's; 0: one dimension
  int64_t expert_ranks = 1;           ///< that have different experts
  bool experts_differ = false;        ///< said by differs_over; else by tensor_parallel_fn
  double replicated_probability = 0;  ///< of a parameter
  double toggled_probability = 0;     ///< of a parameter, or of a module's, to be frozen in some steps
  double evaluated_probability = 0;   ///< of a step to have an evaluation with autograd on before, among or behind what is toggled
  double written_probability = 0;     ///< of values to be written at one place before a step
  double alias_probability = 0;       ///< of a parameter's memory to be shown by another tensor from before fully_shard
  bool ties_by_set_data = false;      ///< two parameters show one memory
  bool draws_budgets = false;         ///< a byte budget, another one from step to step
  double hooked_probability = 0;      ///< of a sharded parameter to have a gradient hook of the user's
  double grad_dtype_probability = 0;  ///< of a parameter to have a grad_dtype
  std::optional<PlainCode> plain_code = {};
  uint64_t seed = 0;  ///< of what is decided while building
};

RandomTree draw_tree(uint64_t seed);
/// True if `tensor` is one of `tensors`, not only equal to one.
inline bool is_among(const at::Tensor& tensor, const std::vector<at::Tensor>& tensors) {
  return std::any_of(tensors.begin(), tensors.end(), [&](const auto& one) { return one.is_same(tensor); });
}
/// True if `wanted` is of the part or of one in it.
bool contains(const Part& part, const std::function<bool(const Part&)>& wanted);
std::string describe(const RandomTree& tree);

/// What a user sets something on: the sharded parameter, or what the module's member holds.
enum class By { kSharded, kMember };
inline at::Tensor chosen(By by, const NamedTensors& registered, const std::string& name, const at::Tensor& member) {
  if (by == By::kMember) return member;
  for (const auto& [known, parameter] : registered)
    if (known == name) return parameter;
  throw std::logic_error("no sharded parameter is called " + name);
}

/// The model of `tree` with its loss and the calls of fully_shard.
Workload build(const RandomTree& tree);

}  // namespace fsdp::test
