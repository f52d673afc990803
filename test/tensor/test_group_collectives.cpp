#include <catch2/catch.hpp>

#include "base/raw_view.hpp"
#include "collectives/all_gather.hpp"
#include "collectives/buffer.hpp"
#include "collectives/reduce_scatter.hpp"
#include "support/draw.hpp"
#include "support/ranks.hpp"
#include "tensor/shard_part.hpp"

// One group's tensors gathered and reduced together, over worlds that pack all, some or none.
namespace fsdp::test {
namespace {

struct World {
  int size;
  ThreadRanksOptions options;
};

World draw_world(Draw& draw) {
  const int size = static_cast<int>(draw.between(1, 5));
  return {size,
          {.timeout = patience(), .launches_batches = draw.between(0, 9) < 7, .packs_below = draw.one_of<int64_t>({0, 40, 100'000})}};
}

/// Rows of a matrix, on all ranks the same.
at::Tensor rows(int64_t count, int64_t width, int64_t start) {
  return (torch::arange(count * width, at::kFloat) + static_cast<double>(start)).view({count, width});
}

/// Bytes of the inputs that are neither in the memory nor a gradient.
int64_t bytes_beside(const ReduceScatter& reduction, const at::Tensor& memory, const std::vector<ReduceEntry>& entries) {
  int64_t bytes = 0;
  for (const auto& input : reduction.inputs.tensors()) {
    const bool is_gradient = std::any_of(entries.begin(), entries.end(), [&](const ReduceEntry& entry) {
      return entry.gradient.defined() && input.is_alias_of(entry.gradient);
    });
    if (!is_gradient && !(memory.defined() && input.is_alias_of(memory))) bytes += static_cast<int64_t>(input.nbytes());
  }
  return bytes;
}

}  // namespace

TEST_CASE("a group's all-gather puts every rank's pieces side by side", "[collectives][all_gather]") {
  for (uint64_t seed = 0; seed < 60; ++seed) {
    Draw draw(seed);
    const auto world = draw_world(draw);
    std::vector<int64_t> pieces(static_cast<size_t>(draw.between(1, 6)));
    for (auto& bytes : pieces) bytes = draw.between(0, 90);
    std::vector<Piece> described;
    for (const int64_t bytes : pieces) described.push_back({.bytes = bytes});
    CAPTURE(seed, world.size, pieces);
    const bool keeps = seed % 2 == 1;
    const bool ok = on_ranks(world.size, [&](Rank& rank) {
      const PieceLayout layout(described, *rank.world());
      auto local = at::zeros({layout.rank_bytes()}, at::kByte);
      // Views of local that the first gather makes are what the second sends, of other values.
      GatherViews views;
      for (int round = 0; round < 2; ++round) {
        const auto value = [&](size_t i, int from) { return static_cast<int>(10 * i) + 100 * round + from + 1; };
        for (size_t i = 0; i < pieces.size(); ++i)
          local.narrow(0, layout.offset(i), pieces[i]).fill_(value(i, rank.index()));
        const auto before = views.inputs;
        const auto whole =
            finish_all_gather(start_all_gather(layout, local, {*rank.world(), "group"}, {}, keeps ? &views : nullptr));
        for (size_t i = 0; i < pieces.size(); ++i)
          for (int from = 0; from < world.size; ++from)
            rank.check_identical(whole.narrow(0, layout.tensor_offset(i) + from * pieces[i], pieces[i]),
                                 at::full({pieces[i]}, value(i, from), at::kByte),
                                 fmt::format("piece {} of rank {}", i, from));
        for (size_t i = 0; i < before.size(); ++i)
          rank.check(views.inputs.size() == before.size() && views.inputs[i].is_same(before[i]), "views are made once");
        views.outputs.let_go();
      }
      const bool anything = layout.rank_bytes() > 0;
      rank.check_equal(rank.calls().size(), 2 * static_cast<size_t>(anything), "collectives");
      rank.check_equal(views.inputs.empty(), !(anything && keeps), "views of what is sent");
    }, world.options);
    CHECK(ok);
  }
}

TEST_CASE("a group's reduce-scatter gives each rank the sum of its rows", "[collectives][reduce_scatter]") {
  for (uint64_t seed = 0; seed < 60; ++seed) {
    Draw draw(seed);
    const auto world = draw_world(draw);
    struct Drawn {
      int64_t count, width;
      bool is_transposed, is_absent;
      int64_t dim;
      bool is_cast;
    };
    std::vector<Drawn> drawn;
    for (int64_t i = draw.between(1, 6); i > 0; --i)
      drawn.push_back({draw.between(1, 9), draw.between(1, 5), draw.between(0, 9) < 3, draw.between(0, 9) < 2,
                       draw.between(0, 1), draw.between(0, 9) < 2});
    CAPTURE(seed, world.size);
    const bool ok = on_ranks(world.size, [&](Rank& rank) {
      std::vector<ShardLayout> layouts;
      std::vector<ReduceSegment> segments;
      std::vector<ReduceEntry> entries;
      for (const auto& one : drawn) {
        layouts.emplace_back(std::vector<int64_t>{one.count, one.width}, std::vector<int64_t>{one.width, 1},
                             one.dim, world.size);
        segments.push_back({layouts.back().padded_local_numel()});
      }
      for (size_t i = 0; i < drawn.size(); ++i) {
        auto gradient = rows(drawn[i].count, drawn[i].width, 0) * (rank.index() + 1);
        if (drawn[i].is_transposed) gradient = gradient.t().contiguous().t();
        if (drawn[i].is_cast && rank.index() % 3 > 0) gradient = gradient.to(at::kDouble);
        entries.push_back({.gradient = drawn[i].is_absent && rank.index() % 2 == 0 ? at::Tensor() : gradient,
                           .layout = &layouts[i],
                           .segment = i,
                           .is_cast = drawn[i].is_cast});
      }
      // Of half of them the inputs that all ranks pack go to memory that is given.
      ReduceScatterOptions options{.sum = at::kFloat};
      const int64_t packed = packed_bytes(segments, entries, options, *rank.world());
      if (seed % 2 == 0) options.memory = at::full({packed}, 0xFF, at::kByte);
      int64_t counted = 0;
      const CountedBuffers count(counted);
      ReduceScatter reduction;
      pack_reduce_scatter(reduction, segments, entries, options, *rank.world(), "group");
      int64_t input_bytes = 0;
      for (const auto& input : reduction.inputs.tensors())
        if (options.memory.defined() && input.is_alias_of(options.memory))
          input_bytes += aligned(static_cast<int64_t>(input.nbytes()));
      rank.check_equal(input_bytes, options.memory.defined() ? packed : 0, "all of the memory is used");
      const int64_t allocated = reduction.layout->rank_bytes() + bytes_beside(reduction, options.memory, entries);
      launch_reduce_scatter(reduction, options, *rank.world(), "group");
      rank.check_equal(counted, allocated, "the bytes that were allocated");
      if (reduction.work) reduction.work->wait();
      free_reduce_scatter_inputs(reduction);
      rank.check(reduction.inputs.tensors().empty(), "the inputs are let go of");
      for (size_t i = 0; i < drawn.size(); ++i) {
        int64_t weight = 0;
        for (int r = 0; r < world.size; ++r) weight += drawn[i].is_absent && r % 2 == 0 ? 0 : r + 1;
        const auto expected = part_of(layouts[i], rows(drawn[i].count, drawn[i].width, 0) * weight, rank.index());
        rank.check_close(raw_view(reduction.output, layouts[i].local_numel(rank.index()), reduced_offset(reduction, i)),
                         expected.reshape({-1}), fmt::format("entry {}", i));
      }
    }, world.options);
    CHECK(ok);
  }
}

}  // namespace fsdp::test
