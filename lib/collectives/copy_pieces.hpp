#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace fsdp {

/// Pieces of equal length in the host's memory, and how far apart they lie, in bytes.
struct PieceCopy {
  int64_t count = 0, bytes = 0;
  int64_t to_step = 0, from_step = 0;
};

namespace detail {
template <int64_t kBytes>
using Constant = std::integral_constant<int64_t, kBytes>;

/// kSlot: bytes that each piece takes where it goes, zeros behind it. A step may be a constant of the compiler's.
template <int64_t kBytes, int64_t kSlot, class ToStep, class FromStep>
void copy_by(char* to, const char* from, int64_t count, ToStep to_step, FromStep from_step) {
#pragma GCC unroll 8
  for (int64_t i = 0; i < count; ++i) {
    char slot[kSlot] = {};
    std::memcpy(slot, from, kBytes);
    std::memcpy(to, slot, kSlot);
    to += to_step;
    from += from_step;
  }
}

template <int64_t kBytes, int64_t kSlot = kBytes>
void copy_pieces_of(char* to, const char* from, const PieceCopy& pieces) {
  if (pieces.to_step == kBytes)
    copy_by<kBytes, kSlot>(to, from, pieces.count, Constant<kBytes>(), pieces.from_step);
  else if (pieces.from_step == kBytes)
    copy_by<kBytes, kSlot>(to, from, pieces.count, pieces.to_step, Constant<kBytes>());
  else
    copy_by<kBytes, kSlot>(to, from, pieces.count, pieces.to_step, pieces.from_step);
}
}  // namespace detail

/// With a thousand ranks a small parameter's pieces are a few bytes each, and a call of memcpy costs more than
/// they do.
inline void copy_pieces(void* to, const void* from, const PieceCopy& pieces) {
  auto* into = static_cast<char*>(to);
  const auto* out_of = static_cast<const char*>(from);
  switch (pieces.bytes) {
    case 0: return;
    case 2: return detail::copy_pieces_of<2>(into, out_of, pieces);
    case 4: return detail::copy_pieces_of<4>(into, out_of, pieces);
    case 8: return detail::copy_pieces_of<8>(into, out_of, pieces);
    case 16: return detail::copy_pieces_of<16>(into, out_of, pieces);
    case 32: return detail::copy_pieces_of<32>(into, out_of, pieces);
    default:
      for (int64_t i = 0; i < pieces.count; ++i)
        std::memcpy(into + i * pieces.to_step, out_of + i * pieces.from_step, static_cast<size_t>(pieces.bytes));
  }
}

/// The same, with zeros behind each piece up to `slot` bytes: fewer than 16 of them, slot a multiple of 16.
inline void copy_padded_pieces(void* to, const void* from, const PieceCopy& pieces, int64_t slot) {
  auto* into = static_cast<char*>(to);
  const auto* out_of = static_cast<const char*>(from);
  if (slot == 16 && pieces.bytes == 4) return detail::copy_pieces_of<4, 16>(into, out_of, pieces);
  if (slot == 16 && pieces.bytes == 8) return detail::copy_pieces_of<8, 16>(into, out_of, pieces);
  if (slot > pieces.bytes) {
    static constexpr char kZeros[16] = {};
    detail::copy_pieces_of<16>(into + slot - 16, kZeros, {.count = pieces.count, .to_step = pieces.to_step});
  }
  copy_pieces(to, from, pieces);
}

}  // namespace fsdp
