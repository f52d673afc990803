#include "checkpoint/format/entry_bits.hpp"

#include <algorithm>
#include <functional>

namespace fsdp {

namespace {

constexpr size_t kBits = 64;

/// use(entry, word, mask) of each tensor.
template <class Use>
void for_bits(const Catalogue& catalogue, const Use& use) {
  size_t number = 0;
  for (const auto& [name, section] : catalogue.sections)
    for (const auto& entry : section.tensors) {
      use(entry, number / kBits, uint64_t{1} << (number % kBits));
      ++number;
    }
}

}  // namespace

std::vector<int64_t> to_bits(const Catalogue& catalogue, const CatalogueEntries& entries) {
  std::vector<int64_t> bits;
  for_bits(catalogue, [&](const auto& entry, size_t word, uint64_t mask) {
    bits.resize(word + 1);
    if (entries.contains(&entry)) bits[word] |= static_cast<int64_t>(mask);
  });
  return bits;
}

CatalogueEntries from_bits(const Catalogue& catalogue, const std::vector<int64_t>& bits) {
  CatalogueEntries entries;
  for_bits(catalogue, [&](const auto& entry, size_t word, uint64_t mask) {
    if ((static_cast<uint64_t>(bits[word]) & mask) != 0) entries.insert(&entry);
  });
  return entries;
}

std::vector<int64_t> joined(const std::vector<std::vector<int64_t>>& ranks) {
  auto all = ranks.front();
  for (const auto& rank : ranks) std::transform(all.begin(), all.end(), rank.begin(), all.begin(), std::bit_or<>());
  return all;
}

}  // namespace fsdp
