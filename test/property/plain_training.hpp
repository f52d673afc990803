#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "support/training_code.hpp"

namespace fsdp::test {

struct RandomTree;

/// What a program does to parameters, by LibTorch's functions alone. It freezes and thaws some as any draw may, see Toggle.
struct PlainCode {
  enum class Optimizer { kAdamW, kAdam, kSgd, kRmsprop, kAdagrad };
  enum class Clip { kNone, kNorm1, kNorm2, kNormInf, kValue, kOwnLoop };
  enum class Penalty { kNone, kSquares, kAbsolute };
  enum class Average { kNone, kOfShards, kOfWhole };  ///< kOfWhole: its copies are taken before fully_shard

  Optimizer optimizer = Optimizer::kAdamW;
  bool is_variant = false;  ///< amsgrad, nesterov, centered, a decaying rate
  bool decays = false;      ///< weights
  bool is_built_before = false;
  Clip clip = Clip::kNone;
  double max_norm = 0;
  Penalty penalty = Penalty::kNone;
  Average average = Average::kNone;
  double init_probability = 0;  ///< of a parameter to be initialised anew
  uint64_t seed = 0;
};

/// None: the model trains by the library's own functions.
std::optional<PlainCode> draw_plain_code(const RandomTree& tree);
std::string describe(const PlainCode& code);

/// Which parameters of a model a program leaves alone, by name.
struct LeftAlone {
  std::function<bool(const std::string& name)> by_init, by_penalty;
};

/// Called around what the program does; while what it returns lives, collectives are the program's own.
using OwnCollectives = std::function<std::shared_ptr<void>()>;

std::shared_ptr<TrainingCode> make_code(std::shared_ptr<torch::nn::Module> module, const PlainCode& drawn, LeftAlone left,
                                        OwnCollectives own);

}  // namespace fsdp::test
