#include "checkpoint/plan/pieces.hpp"

#include <algorithm>
#include <tuple>

#include "checkpoint/format/block_sums.hpp"

namespace fsdp {

Positions share_of(int64_t count, int64_t element_bytes, int64_t sharers, int64_t index, int64_t turn) {
  if (sharers == 1) return {0, count};
  const int64_t block = kBlockBytes / element_bytes;
  if (count <= block) return turn % sharers == index ? Positions{0, count} : Positions{};
  // Whole blocks, so that each share is written in large pieces.
  const int64_t each = ((count + sharers - 1) / sharers + block - 1) / block * block;
  return {std::min(count, index * each), std::min(count, (index + 1) * each)};
}

void add_pieces(std::vector<FilePiece>& pieces, size_t tensor, std::span<const ElementRange> ranges, Positions positions,
                const FilePlace& place, int64_t element_bytes) {
  int64_t position = 0;
  for (const auto& range : ranges) {
    const int64_t begin = std::max(position, positions.begin), end = std::min(position + range.count(), positions.end);
    if (begin < end)
      pieces.push_back({place.file, place.offset + (range.begin + begin - position) * element_bytes, tensor, begin,
                        end - begin});
    position += range.count();
  }
}

void sort(std::vector<FilePiece>& pieces) {
  std::sort(pieces.begin(), pieces.end(), [](const FilePiece& a, const FilePiece& b) {
    return std::tie(a.file, a.offset) < std::tie(b.file, b.offset);
  });
}

}  // namespace fsdp
