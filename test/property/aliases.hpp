#pragma once

#include <string>
#include <utility>
#include <vector>

#include "property/random_tree.hpp"

namespace fsdp::test {

/// Tensors that a program makes of parameters before fully_shard: views, detached aliases, and tensors that `set_data` lets show
/// their memory.
class Aliases {
 public:
  /// apart: of which a rank has a part already, and those that fully_shard leaves alone.
  Aliases(const RandomTree& tree, const torch::nn::Module& model, const std::vector<at::Tensor>& apart);
  /// Before fully_shard.
  void make();
  /// Afterwards: each shows the parameter as it is now, or is refused by its name. A collective call.
  void read(const Rank& rank, const NamedTensors& registered, const std::string& when) const;

 private:
  enum class Way { kDetached, kData, kView, kPart, kSetData };
  static constexpr int64_t kWays = 5;
  struct Alias {
    std::string name;
    at::Tensor member;
    Way way;
    at::Tensor tensor = {};
  };
  static at::Tensor shown(Way way, const at::Tensor& parameter);

  std::vector<Alias> aliases_;
};

/// Two parameters that show one memory, by set_data before fully_shard.
struct SetDataTie {
  std::pair<std::string, std::string> names;
  at::Tensor first, second;

  /// Undefined tensors: there is none.
  static SetDataTie draw(const RandomTree& tree, const torch::nn::Module& model, const std::vector<at::Tensor>& cut);
  bool is_there() const { return first.defined(); }
  void make() const;
  /// message: of fully_shard, which refuses it.
  void check_refused(const Rank& rank, const std::string& message) const;
};

}  // namespace fsdp::test
