#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace fsdp {

/// What a group's parameters held when they were sharded, as far as a few elements of each tell.
/// Each rank has the whole values then, and afterwards its part of its own: ranks that began with
/// others train a mosaic, which no collective shows. So they compare these, once.
class FirstValues {
 public:
  /// Adds a parameter; to be called for each, in their order. whole: undefined where nothing is to be compared (it was on meta,
  /// or its values come from elsewhere). What is not on the host stays where it is until `hashes_of`. version: of the sharded
  /// parameter.
  void add(const at::Tensor& whole, int64_t version);

  /// Returns a hash for each parameter of each of `all`; nullopt where there is none to compare. Waits for devices, once for
  /// all of them.
  static std::vector<std::vector<std::optional<uint32_t>>> hashes_of(
      std::span<const FirstValues* const> all);
  int64_t version(size_t param) const { return samples_[param].version; }

 private:
  struct Sample {
    std::optional<uint32_t> hash = {};
    at::Tensor elements = {};  // of which the hash is to be made; 1-D, not on the host
    int64_t version = 0;
  };
  std::vector<Sample> samples_;
};

/// One group's, as ranks compare them.
struct Beginning {
  std::string group;
  std::vector<std::string> params;
  std::vector<std::optional<uint32_t>> hashes;  ///< by parameter
  /// Ranks of the world: the next one that holds other pieces of the same copy, and the next that
  /// holds the same piece of another; -1: there is none. So all compare with all, in two rings.
  int next_beside = -1, next_replica = -1;
};

/// Writes what one rank leaves for the others.
std::string encode(std::span<const Beginning> beginnings);
/// Returns the name of the first parameter of `own` that `note`, of another rank, has another hash of; nullopt if there is
/// none.
std::optional<std::string> find_other_values(const Beginning& own, const std::string& note);

}  // namespace fsdp
