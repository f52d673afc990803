#pragma once

#include <cstdint>
#include <cstring>

namespace fsdp {

/// Pieces of equal length in the host's memory, and how far apart they lie, in bytes.
struct PieceCopy {
  int64_t count = 0, bytes = 0;
  int64_t to_step = 0, from_step = 0;
};

namespace detail {
template <int64_t kBytes>
void copy_pieces_of(char* to, const char* from, const PieceCopy& pieces) {
  for (int64_t i = 0; i < pieces.count; ++i)
    std::memcpy(to + i * pieces.to_step, from + i * pieces.from_step, kBytes);
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

}  // namespace fsdp
