#pragma once

#include <string>
#include <vector>

#include "property/parts.hpp"
#include "property/random_tree.hpp"

namespace fsdp::test {

/// What a program does to the values of parameters between steps: in place, through `data()`, by `set_data`, and two
/// parameters exchanged. The same on the plain model and on the sharded one.
class ValueWrites {
 public:
  /// Where in what comes before a step.
  enum class Place { kFirst, kBehindEvaluation };

  /// model: whole, before its slices are cut.
  ValueWrites(const RandomTree& tree, const torch::nn::Module& model);
  /// registered: the model's parameters as they are now.
  void apply(int step, Place place, const NamedTensors& registered) const;

 private:
  enum class Way {
    kScale, kScaleData, kShiftData, kScaleViewOfData,           // by numbers, on whatever part of it is there
    kFillPartOfData, kCopy, kCopyData, kSetData,                // of the whole
    kExchangeByCopy, kExchangeBySetData, kExchangeDataInPlace,  // with another of the same form
  };
  struct Param {
    std::string name;
    at::Tensor member;
    bool is_slice = false, shows_whole = true;  ///< registered, it has the whole's sizes
  };
  struct Write {
    int step;
    Place place;
    Way way;
    By by;
    size_t param, other;
    uint64_t seed;
  };

  void add(Draw& draw, int step, Place place);
  at::Tensor find(const Write& write, size_t param, const NamedTensors& registered) const;
  void apply(const Write& write, const NamedTensors& registered) const;

  bool is_cast_;  // members compute in another dtype
  std::vector<Param> params_;
  std::vector<Write> writes_;
};

}  // namespace fsdp::test
