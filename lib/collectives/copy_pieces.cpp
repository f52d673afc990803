#include "collectives/copy_pieces.hpp"

#include <cstring>
#include <type_traits>

namespace fsdp {

namespace {
template <int64_t kBytes>
using Constant = std::integral_constant<int64_t, kBytes>;

/// Sixteen bytes, of which the first are a piece of kBytes and the others zeros: one load and one store, as this is a
/// register of the processor's. An array of char takes a way through memory.
template <int64_t kBytes>
struct PaddedPiece {
  using Word = std::conditional_t<kBytes == 2, int16_t, std::conditional_t<kBytes == 4, int32_t, int64_t>>;
  using Slot __attribute__((vector_size(16))) = Word;
  static void copy(char* to, const char* from) {
    Word word;
    std::memcpy(&word, from, kBytes);
    const Slot slot = {word};
    std::memcpy(to, &slot, sizeof slot);
  }
};

/// kSlot: bytes that each piece takes where it goes, zeros behind it. A step may be a constant of the compiler's.
template <int64_t kBytes, int64_t kSlot, class ToStep, class FromStep>
void copy_by(char* to, const char* from, int64_t count, ToStep to_step, FromStep from_step) {
#pragma GCC unroll 8
  for (int64_t i = 0; i < count; ++i) {
    if constexpr (kSlot > kBytes)
      PaddedPiece<kBytes>::copy(to, from);
    else
      std::memcpy(to, from, kBytes);
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
}  // namespace

void copy_pieces(void* to, const void* from, const PieceCopy& pieces) {
  auto* into = static_cast<char*>(to);
  const auto* out_of = static_cast<const char*>(from);
  switch (pieces.bytes) {
    case 0: return;
    case 2: return copy_pieces_of<2>(into, out_of, pieces);
    case 4: return copy_pieces_of<4>(into, out_of, pieces);
    case 8: return copy_pieces_of<8>(into, out_of, pieces);
    case 16: return copy_pieces_of<16>(into, out_of, pieces);
    case 32: return copy_pieces_of<32>(into, out_of, pieces);
    default:
      for (int64_t i = 0; i < pieces.count; ++i)
        std::memcpy(into + i * pieces.to_step, out_of + i * pieces.from_step, static_cast<size_t>(pieces.bytes));
  }
}

void copy_padded_pieces(void* to, const void* from, const PieceCopy& pieces, int64_t slot) {
  auto* into = static_cast<char*>(to);
  const auto* out_of = static_cast<const char*>(from);
  if (slot == 16 && pieces.bytes == 2) return copy_pieces_of<2, 16>(into, out_of, pieces);
  if (slot == 16 && pieces.bytes == 4) return copy_pieces_of<4, 16>(into, out_of, pieces);
  if (slot == 16 && pieces.bytes == 8) return copy_pieces_of<8, 16>(into, out_of, pieces);
  if (slot > pieces.bytes) {
    static constexpr char kZeros[16] = {};
    copy_pieces_of<16>(into + slot - 16, kZeros, {.count = pieces.count, .to_step = pieces.to_step});
  }
  copy_pieces(to, from, pieces);
}

}  // namespace fsdp
