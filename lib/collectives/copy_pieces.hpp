#pragma once

#include <cstdint>

namespace fsdp {

/// Pieces of equal length in the host's memory, and how far apart they lie, in bytes.
struct PieceCopy {
  int64_t count = 0, bytes = 0;
  int64_t to_step = 0, from_step = 0;
};

/// With a thousand ranks a small parameter's pieces are a few bytes each, and a call of memcpy costs more than
/// they do.
void copy_pieces(void* to, const void* from, const PieceCopy& pieces);

/// Copies so, and writes zeros behind each piece up to `slot` bytes: fewer than 16 of them, slot a multiple of 16.
void copy_padded_pieces(void* to, const void* from, const PieceCopy& pieces, int64_t slot);

}  // namespace fsdp
