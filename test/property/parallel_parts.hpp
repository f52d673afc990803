#pragma once

#include <memory>

#include "property/parts.hpp"

namespace fsdp::test {

inline constexpr auto kColumns = "columns", kExperts = "experts";

/// What rank `rank` of `ranks` has of a tensor that is cut along `dim`, contiguous.
at::Tensor chunk(const at::Tensor& whole, int64_t dim, int64_t rank, int64_t ranks);

/// Two linear layers, the first cut by columns of the product and the second by rows: tensor parallelism.
std::shared_ptr<Node> build_columns(const Part& part);

/// A tensor of experts of which each batch passes one, chosen by its rank: expert parallelism.
std::shared_ptr<Node> build_experts(const Part& part);

}  // namespace fsdp::test
