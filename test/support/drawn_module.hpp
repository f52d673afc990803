#pragma once

#include <algorithm>
#include <limits>
#include <random>

#include "support/models.hpp"

namespace fsdp::test {

inline int pick(std::mt19937_64& draw, int count) { return static_cast<int>(draw() % static_cast<uint64_t>(count)); }

/// What modules are drawn from.
struct DrawnParts {
  std::vector<at::ScalarType> dtypes;
  int dims = 4;                ///< at most
  std::vector<int64_t> sizes;  ///< the first seldom
  int64_t third_size = std::numeric_limits<int64_t>::max();  ///< at most: of parameters of three dimensions and more
};

/// Parameters of any number of dimensions, empty ones, other strides, several dtypes, buffers, and groups within groups.
struct DrawnImpl : torch::nn::Module {
  DrawnImpl(std::mt19937_64& draw, const DrawnParts& parts, int depth = 0) {
    const int count = pick(draw, 4) + (depth == 0 ? 1 : 0);
    for (int i = 0; i < count; ++i) add_parameter(draw, parts, fmt::format("p{}", i));
    if (pick(draw, 2)) register_buffer("table", torch::randn({pick(draw, 4), 3}));
    for (int i = 0; depth < 2 && i < pick(draw, 3); ++i)
      blocks.push_back(register_module(fmt::format("c{}", i), std::make_shared<DrawnImpl>(draw, parts, depth + 1)));
    is_group = depth == 0 || pick(draw, 2);
  }

  void add_parameter(std::mt19937_64& draw, const DrawnParts& parts, const std::string& name) {
    const auto count = [](const auto& values) { return static_cast<int>(values.size()); };
    std::vector<int64_t> sizes;
    for (int dim = pick(draw, parts.dims + 1); dim > 0; --dim)
      sizes.push_back(parts.sizes[pick(draw, 12) == 0 ? 0 : 1 + pick(draw, count(parts.sizes) - 1)]);
    if (sizes.size() > 2) sizes[2] = std::min(sizes[2], parts.third_size);
    const auto dtype = parts.dtypes[pick(draw, count(parts.dtypes))];
    auto values = torch::randn(sizes).mul(9).to(dtype);
    if (sizes.size() > 1 && pick(draw, 2)) values = values.transpose(0, 1);
    register_parameter(name, values, at::isFloatingType(dtype) && pick(draw, 4));
  }

  void shard(const FullyShardOptions& options) {
    for (auto& child : blocks) child->shard(options);
    if (is_group) fully_shard(*this, options);
  }

  std::vector<std::shared_ptr<DrawnImpl>> blocks;
  bool is_group = false;
};

/// The same structure for the same seed; other values for other `values`.
inline std::shared_ptr<DrawnImpl> drawn_module(uint64_t seed, uint64_t values, const DrawnParts& parts) {
  return seeded(values, [&] {
    std::mt19937_64 draw(seed);
    return std::make_shared<DrawnImpl>(draw, parts);
  });
}

}  // namespace fsdp::test
