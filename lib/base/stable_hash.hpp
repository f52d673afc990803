#pragma once

#include <cstdint>
#include <string_view>

// Hashes that every rank computes alike on every machine, which std::hash does not promise.
namespace fsdp {

constexpr uint64_t mixed_hash(uint64_t hash, uint64_t value) {
  hash = (hash ^ value) * 0x9E3779B97F4A7C15ULL;
  return hash ^ (hash >> 29);
}

constexpr uint64_t stable_hash(std::string_view text) {
  uint64_t hash = text.size();
  for (const char c : text) hash = mixed_hash(hash, static_cast<unsigned char>(c));
  return hash;
}

}  // namespace fsdp
