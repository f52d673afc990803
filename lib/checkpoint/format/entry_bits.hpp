#pragma once

#include <cstdint>
#include <unordered_set>
#include <vector>

#include "checkpoint/format/catalogue.hpp"

// Which of a checkpoint's tensors, as ranks tell each other: a bit for each tensor, in the order of the catalogue, which is
// the same on all of them. Names would be many times as much, for each of the ranks.
namespace fsdp {

using CatalogueEntries = std::unordered_set<const Catalogue::TensorEntry*>;

std::vector<int64_t> to_bits(const Catalogue& catalogue, const CatalogueEntries& entries);
CatalogueEntries from_bits(const Catalogue& catalogue, const std::vector<int64_t>& bits);
/// Returns the bits that any rank has set. ranks: the bits of each, at least one rank's.
std::vector<int64_t> joined(const std::vector<std::vector<int64_t>>& ranks);

}  // namespace fsdp
