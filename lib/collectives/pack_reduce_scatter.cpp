// What goes into a reduce-scatter: which gradients travel as they lie, and how the others are packed.
#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>

#include "base/raw_view.hpp"
#include "collectives/buffer.hpp"
#include "collectives/copy_pieces.hpp"
#include "collectives/quarantine.hpp"
#include "collectives/reduce_scatter.hpp"
#include "tensor/shard_part.hpp"
#include "tensor/strides.hpp"

namespace fsdp {

namespace {

using Entries = std::span<const ReduceEntry>;

bool lies_as_layout(const ReduceEntry& entry) {
  return lay_out_alike(entry.gradient.sizes(), entry.gradient.strides(), entry.layout->strides());
}

bool is_cast(const ReduceEntry& entry, caffe2::TypeMeta to) {
  return entry.gradient.defined() && entry.gradient.dtype() != to;
}

/// True if the segment is one gradient that travels from where it is: what the ranks do not divide needs
/// padding, and so a copy, as does what is cast, is not there, or lies otherwise in memory.
bool travels_as_it_is(Entries segment, int64_t tensor_numel, caffe2::TypeMeta to) {
  const auto& first = segment[0];
  return segment.size() == 1 && first.gradient.defined() && first.layout->numel() == tensor_numel &&
         !is_cast(first, to) && lies_as_layout(first);
}

/// True if the ranks pack the segment whatever their gradients are.
bool is_packed_by_all(Entries segment, int64_t tensor_numel) {
  return segment.size() > 1 || segment[0].layout->numel() != tensor_numel || segment[0].is_cast;
}

/// Elements [first, last) of the entry's gradient, as they lie in memory, to `to` (1-D, as long).
void write_elements(const ReduceEntry& entry, int64_t first, int64_t last, const at::Tensor& to) {
  const auto& gradient = entry.gradient;
  const auto* layout = entry.layout;
  if (lies_as_layout(entry)) {
    const auto from = raw_view(gradient, last - first, gradient.storage_offset() + first);
    if (to.is_cpu() && !is_cast(entry, to.dtype()))
      std::memcpy(to.mutable_data_ptr(), from.const_data_ptr(), static_cast<size_t>(to.nbytes()));
    else
      to.copy_(from);
  } else if (first == 0 && last == layout->numel()) {
    to.as_strided(layout->sizes(), layout->strides(), to.storage_offset()).copy_(gradient);
  } else if (!layout->is_flat() && !layout->sizes().empty()) {
    // Chunks of rows.
    auto sizes = layout->sizes();
    auto& rows = sizes[static_cast<size_t>(layout->dim())];
    rows = (last - first) / layout->row_numel();
    to.as_strided(sizes, layout->strides(), to.storage_offset())
        .copy_(gradient.narrow(layout->dim(), first / layout->row_numel(), rows));
  } else {
    to.copy_(in_memory_order(gradient, layout->strides()).narrow(0, first, last - first));
  }
}

/// What lies in elements [begin, end) of the segment, to `to` (1-D, at least as long); zeros where nothing does.
void write_range(Entries segment, int64_t begin, int64_t end, const at::Tensor& to) {
  int64_t written = 0;
  for (const auto& entry : segment) {
    const int64_t first = std::max(begin, entry.start);
    const int64_t last = std::min(end, entry.start + entry.layout->numel());
    if (!entry.gradient.defined() || first >= last) continue;
    if (first - begin > written) to.narrow(0, written, first - begin - written).zero_();
    write_elements(entry, first - entry.start, last - entry.start,
                   to.narrow(0, first - begin, last - first));
    written = last - begin;
  }
  if (written < to.numel()) to.narrow(0, written, to.numel() - written).zero_();
}

/// One rank's piece of a segment to `to` (1-D, a piece long or more), zeros after it.
void write_piece(Entries segment, int64_t piece_numel, int rank, const at::Tensor& to) {
  const auto& layout = *segment[0].layout;
  if (layout.outer() == 1) return write_range(segment, rank * piece_numel, (rank + 1) * piece_numel, to);
  const int64_t numel = segment[0].gradient.defined() ? layout.local_numel(rank) : 0;
  if (numel > 0)
    to.as_strided(layout.local_sizes(rank), layout.local_strides(rank), to.storage_offset())
        .copy_(part_of(layout, segment[0].gradient, rank));
  to.narrow(0, numel, to.numel() - numel).zero_();
}

/// The entries of each segment, in turn.
class UnitWalk {
 public:
  explicit UnitWalk(Entries entries) : rest_(entries) {}
  Entries next() {
    size_t count = 0;
    while (count < rest_.size() && rest_[count].segment == rest_[0].segment) ++count;
    const auto segment = rest_.first(count);
    rest_ = rest_.subspan(count);
    return segment;
  }

 private:
  Entries rest_;
};

/// Where a reduction's buffers come from.
struct Allocate {
  at::TensorOptions options;
  ReduceScatterComm* custom;
  std::string_view subject;
  at::Tensor memory = {};  // of what all ranks pack; undefined: there is none
  int64_t used = 0;        // bytes of that
  int64_t itemsize() const { return static_cast<int64_t>(options.dtype().itemsize()); }
  at::Tensor operator()(int64_t numel) const {
    return make_buffer(numel, options, custom, subject);
  }
  at::Tensor for_all(int64_t numel) {
    if (!memory.defined()) return (*this)(numel);
    const int64_t bytes = numel * itemsize();
    const auto input = memory.narrow(0, std::exchange(used, used + aligned(bytes)), bytes);
    return input.view(c10::typeMetaToScalarType(options.dtype()));
  }
};

/// One gradient's place in a rank-major buffer: elements from the start of each rank's part.
struct TailPlace {
  int64_t begin = 0, end = 0;  ///< of the piece, with the gap behind it
  int64_t piece_numel = 0;
  int64_t rank_numel = 0;      ///< of all that one rank gets
};

/// True if the segment is one gradient whose pieces, as they lie in memory, are the ranks' one after another.
bool is_in_rank_order(Entries segment) {
  const auto& first = segment[0];
  return segment.size() == 1 && first.start == 0 && first.layout->outer() == 1 &&
         (!first.gradient.defined() || lies_as_layout(first));
}

/// All ranks' pieces of such a segment in two or three copies, however many ranks there are; on CPU, without
/// a cast, in as many memcpys.
void write_all_pieces(const ReduceEntry& entry, const TailPlace& place, int world, const at::Tensor& input) {
  const int64_t numel = entry.gradient.defined() ? entry.layout->numel() : 0;
  const int64_t full = place.piece_numel > 0 ? numel / place.piece_numel : 0;  // ranks that get a whole piece
  const int64_t rest = numel - full * place.piece_numel;
  const int64_t width = place.end - place.begin;
  auto part = [&](int64_t rank, int64_t count, int64_t first, int64_t columns) {
    return raw_view(input, {count, columns}, {place.rank_numel, 1},
                    input.storage_offset() + rank * place.rank_numel + place.begin + first);
  };
  if (input.is_cpu() && !is_cast(entry, input.dtype())) {
    const auto itemsize = static_cast<int64_t>(input.element_size());
    auto* to = static_cast<char*>(input.mutable_data_ptr()) + place.begin * itemsize;
    const int64_t step = place.rank_numel * itemsize, bytes = place.piece_numel * itemsize;
    for (int64_t rank = full; rank < world; ++rank)
      std::memset(to + rank * step, 0, static_cast<size_t>(width * itemsize));
    if (numel > 0) {
      const auto* from = static_cast<const char*>(entry.gradient.const_data_ptr());
      copy_padded_pieces(to, from, {.count = full, .bytes = bytes, .to_step = step, .from_step = bytes},
                         width * itemsize);
      if (rest > 0) std::memcpy(to + full * step, from + full * bytes, static_cast<size_t>(rest * itemsize));
    }
    return;
  }
  const auto begin_of_gradient = numel > 0 ? entry.gradient.storage_offset() : 0;
  if (full > 0)
    part(0, full, 0, place.piece_numel)
        .copy_(raw_view(entry.gradient, {full, place.piece_numel}, {place.piece_numel, 1}, begin_of_gradient));
  if (full > 0 && width > place.piece_numel) part(0, full, place.piece_numel, width - place.piece_numel).zero_();
  if (rest > 0)
    part(full, 1, 0, rest)
        .copy_(raw_view(entry.gradient, {1, rest}, {rest, 1}, begin_of_gradient + full * place.piece_numel));
  if (rest > 0) part(full, 1, rest, width - rest).zero_();
  const int64_t empty = full + (rest > 0 ? 1 : 0);
  if (empty < world) part(empty, world - empty, 0, width).zero_();
}

/// Rank-major: what one collective takes. The tail's segments lie in their own order; what is between
/// and behind their pieces is zero, as it is summed like the rest.
at::Tensor pack_tail(Entries entries, const PieceLayout& layout, Allocate& allocate) {
  const int64_t numel = layout.tail_bytes() / allocate.itemsize();
  const int64_t itemsize = allocate.itemsize();
  auto input = allocate.for_all(layout.world_size() * numel);
  std::vector<std::pair<size_t, Entries>> segments;
  UnitWalk walk(entries);
  for (size_t i = 0; i < layout.count(); ++i) {
    const auto segment = walk.next();
    if (!layout.is_direct(i)) segments.emplace_back(i, segment);
  }
  for (size_t u = 0; u < segments.size(); ++u) {
    const auto& [i, segment] = segments[u];
    const TailPlace place{
        .begin = layout.tail_offset(i) / itemsize,
        .end = u + 1 < segments.size() ? layout.tail_offset(segments[u + 1].first) / itemsize : numel,
        .piece_numel = layout.piece_bytes(i) / itemsize,
        .rank_numel = numel};
    if (is_in_rank_order(segment)) {
      write_all_pieces(segment[0], place, layout.world_size(), input);
      continue;
    }
    for (int rank = 0; rank < layout.world_size(); ++rank)
      write_piece(segment, place.piece_numel, rank,
                  input.narrow(0, rank * numel + place.begin, place.end - place.begin));
  }
  return input;
}

/// Tensor-major: one segment's pieces side by side, the gradient itself where that is what it is.
void add_whole(Entries segment, int64_t numel, Allocate& allocate, ViewPool& inputs) {
  const auto& gradient = segment[0].gradient;
  const bool is_for_all = is_packed_by_all(segment, numel);
  // Where all pack in memory of theirs, so does a rank whose gradient is cast already.
  const bool may_travel = allocate.custom == nullptr && !(is_for_all && allocate.memory.defined());
  if (may_travel && travels_as_it_is(segment, numel, allocate.options.dtype()))
    return inputs.add(gradient, numel, gradient.storage_offset());
  auto input = is_for_all ? allocate.for_all(numel) : allocate(numel);
  write_range(segment, 0, numel, input);
  inputs.add(std::move(input));
}

PackingRule rule_of(const Communicator& group, bool packs_all) {
  const bool packs = packs_all || group.size() == 1 || !group.launches_batches();
  return {.ranks = group.size(), .packs_below = packs ? PieceLayout::kPackAll : group.packs_below()};
}

PieceLayout layout_of(std::span<const ReduceSegment> segments, Entries entries, int64_t itemsize, const PackingRule& rule) {
  std::vector<Piece> pieces;
  pieces.reserve(segments.size());
  UnitWalk walk(entries);
  for (const auto& segment : segments)
    pieces.push_back({.bytes = segment.piece_numel * itemsize, .outer = walk.next()[0].layout->outer()});
  return PieceLayout(std::move(pieces), rule.ranks, rule.packs_below);
}

}  // namespace

int64_t packed_bytes(std::span<const ReduceSegment> segments, Entries entries, const ReduceScatterOptions& options,
                     const Communicator& group) {
  const int64_t world = group.size(), itemsize = static_cast<int64_t>(options.sum.dtype().itemsize());
  if (world == 1 || segments.empty()) return 0;
  const auto layout = layout_of(segments, entries, itemsize, rule_of(group, options.custom != nullptr));
  int64_t bytes = aligned(world * layout.tail_bytes());
  UnitWalk walk(entries);
  for (size_t i = 0; i < layout.count(); ++i)
    if (const auto segment = walk.next(); layout.is_direct(i) && is_packed_by_all(segment, segments[i].piece_numel * world))
      bytes += aligned(layout.tensor_bytes(i));
  return bytes;
}

void pack_reduce_scatter(ReduceScatter& reduction, std::span<const ReduceSegment> segments,
                         std::span<const ReduceEntry> entries, const ReduceScatterOptions& options, Communicator& group,
                         std::string_view subject) {
  const int world = group.size();
  Allocate allocate{options.sum, world == 1 ? nullptr : options.custom, subject, options.memory};
  const int64_t itemsize = allocate.itemsize();
  reduction.poisons_inputs = GuardedBuffers::current() != nullptr;
  reduction.itemsize = itemsize;
  reduction.is_custom = allocate.custom != nullptr;
  reduction.is_scaled = false;
  const auto rule = rule_of(group, reduction.is_custom);
  if (reduction.layout == nullptr || reduction.packing != rule) {
    reduction.layout = std::make_shared<const PieceLayout>(layout_of(segments, entries, itemsize, rule));
    reduction.packing = rule;
  }
  const auto& layout = *reduction.layout;
  if (world == 1) reduction.output = allocate(layout.rank_bytes() / itemsize);
  reduction.inputs.begin();
  UnitWalk walk(entries);
  for (size_t i = 0; i < segments.size(); ++i) {
    const auto segment = walk.next();
    if (world == 1) {
      // No rank to send to: the pieces are written where they are wanted, with the gaps behind them.
      const int64_t begin = layout.offset(i);
      const int64_t end = i + 1 < segments.size() ? layout.offset(i + 1) : layout.rank_bytes();
      write_piece(segment, segments[i].piece_numel, /*rank=*/0,
                  reduction.output.narrow(0, begin / itemsize, (end - begin) / itemsize));
    } else if (layout.is_direct(i) && layout.piece_bytes(i) > 0) {
      add_whole(segment, segments[i].piece_numel * world, allocate, reduction.inputs);
    }
  }
  if (world > 1 && layout.has_tail()) reduction.inputs.add(pack_tail(entries, layout, allocate));
}

}  // namespace fsdp
