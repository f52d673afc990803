#include <catch2/catch.hpp>

#include "fsdp/dtensor.hpp"
#include "fsdp/testing/recording.hpp"
#include "support/printed.hpp"
#include "support/ranks.hpp"
#include "tensor/redistribute/redistribution_plan.hpp"
#include "whole_tensors.hpp"

namespace fsdp::test {
namespace {

using Sizes = std::vector<int64_t>;
using Placements = std::vector<Placement>;

/// The collectives, as "all_gather 192" with the bytes of the full buffer, of a float tensor's redistribution.
std::vector<std::string> sent(Rank& rank, const Sizes& mesh_shape, const Sizes& sizes, const Placements& from,
                              const Placements& to) {
  const DeviceMesh mesh = mesh_of(rank.world(), mesh_shape);
  const at::Tensor local = distribute_tensor(torch::ones(sizes), mesh, without_partial(from)).to_local();
  const DTensor tensor = DTensor::from_local(local, mesh, from, sizes);
  rank.log().clear();
  tensor.redistribute(to);
  std::vector<std::string> calls;
  for (const RecordedCall& call : rank.log().calls) {
    rank.check_equal(call.subject, fmt::format("redistribute ({})", fmt::join(sizes, ", ")), "subject");
    calls.push_back(fmt::format("{} {}", call.operation, call.bytes));
  }
  return calls;
}

struct Row {
  Placements from, to;
  std::vector<std::string> calls;
};

void check_rows(const Sizes& mesh_shape, const Sizes& sizes, const std::vector<Row>& rows) {
  on_ranks(static_cast<int>(c10::multiply_integers(mesh_shape)), [&](Rank& rank) {
    for (const Row& row : rows)
      rank.check_equal(sent(rank, mesh_shape, sizes, row.from, row.to), row.calls,
                       to_string(row.from) + " to " + to_string(row.to));
  });
}

const Partial kMax = {ReduceOp::kMax};

}  // namespace

TEST_CASE("each transition communicates what the header says", "[tensor][redistribution_plan]") {
  // 5 x 6 floats over 4 ranks: 120 bytes; 192 with rows padded to 8, 160 with columns padded to 8.
  check_rows({4}, {5, 6},
             {{{Shard{0}}, {Replicate{}}, {"all_gather 192"}},
              {{Shard{1}}, {Replicate{}}, {"all_gather 160"}},
              {{Shard{0}}, {Shard{1}}, {"all_gather 192"}},
              // Chunks of 3 and 2 rows: rank 0 has 0 and 3, rank 1 has 1 and 4, rank 2 has 2, rank 3 none.
              {{StridedShard{0, 2}}, {Replicate{}}, {"all_gather 192"}},
              {{Shard{0}}, {Shard{0}}, {}},
              {{Shard{0}}, {StridedShard{0, 2}}, {"all_gather 192"}},
              {{Shard{0}}, {Partial{}}, {}},
              {{Shard{0}}, {kMax}, {"all_gather 192"}},
              {{StridedShard{0, 2}}, {Partial{}}, {}},
              {{Replicate{}}, {Shard{0}}, {}},
              {{Replicate{}}, {StridedShard{1, 3}}, {}},
              {{Replicate{}}, {Partial{}}, {}},
              {{Replicate{}}, {kMax}, {}},
              {{Partial{}}, {Replicate{}}, {"all_reduce 120"}},
              {{Partial{}}, {Shard{0}}, {"reduce_scatter 192"}},
              {{Partial{}}, {StridedShard{1, 2}}, {"reduce_scatter 160"}},
              {{kMax}, {Shard{1}}, {"reduce_scatter 160"}},
              {{Partial{}}, {Partial{}}, {}},
              {{Partial{}}, {kMax}, {"all_reduce 120"}}});
}

TEST_CASE("a sum is reduced whole where the padding would cost more", "[tensor][redistribution_plan]") {
  check_rows({4}, {1, 6}, {{{Partial{}}, {Shard{0}}, {"all_reduce 24"}}});
  check_rows({4}, {2, 6}, {{{Partial{}}, {Shard{0}}, {"reduce_scatter 96"}}});
}

TEST_CASE("nothing is sent where there is nothing to send or nobody to send it to", "[tensor][redistribution_plan]") {
  check_rows({1}, {5, 6}, {{{Shard{0}}, {Replicate{}}, {}}, {{Partial{}}, {Shard{1}}, {}}});
  check_rows({3}, {0, 6},
             {{{Shard{0}}, {Replicate{}}, {}},
              {{Partial{}}, {Shard{1}}, {}},
              {{Partial{}}, {Replicate{}}, {}}});
}

TEST_CASE("on two mesh dimensions only those that have to communicate do", "[tensor][redistribution_plan]") {
  // 4 x 4 floats over 2 x 2 ranks: 64 bytes.
  check_rows({2, 2}, {4, 4},
             {{{Shard{0}, Shard{1}}, {Shard{0}, Replicate{}}, {"all_gather 32"}},
              {{Shard{0}, Shard{1}}, {Replicate{}, Shard{1}}, {"all_gather 32"}},
              {{Replicate{}, Shard{0}}, {Shard{1}, Shard{0}}, {}},
              {{Shard{0}, Shard{0}}, {Replicate{}, Replicate{}}, {"all_gather 32", "all_gather 64"}},
              // FSDP's gather of a tensor-parallel parameter stays within its own mesh dimension.
              {{StridedShard{0, 2}, Shard{0}}, {Replicate{}, Shard{0}}, {"all_gather 32"}},
              // Sums first, while pieces are small; the reduce-scatter leaves less for the all-reduce.
              {{Partial{}, Shard{0}}, {Replicate{}, Replicate{}}, {"all_reduce 32", "all_gather 64"}},
              {{Partial{}, Partial{}}, {Replicate{}, Shard{0}}, {"reduce_scatter 64", "all_reduce 32"}},
              {{Partial{}, Shard{0}}, {Shard{1}, Shard{0}}, {"reduce_scatter 32"}},
              {{Partial{}, Shard{0}}, {StridedShard{0, 2}, Shard{0}}, {"reduce_scatter 32"}}});
}

TEST_CASE("each all-gather leaves out what its ranks need no more", "[tensor][redistribution_plan]") {
  // The other order would gather 32 and then all 64 bytes: rows of column blocks are needed only.
  check_rows({2, 2}, {4, 4}, {{{Shard{0}, Shard{0}}, {Shard{1}, Replicate{}}, {"all_gather 32", "all_gather 32"}}});
}

TEST_CASE("all ranks plan the same, and end with what they want", "[tensor][redistribution_plan]") {
  const uint64_t seed = draw_seed();
  INFO("FSDP_TEST_SEED=" << seed);
  Draw draw(seed);
  for (int repeat = 0; repeat < 300; ++repeat) {
    const Sizes shape = draw.one_of(kMeshShapes), sizes = draw.sizes(0, 3, 6);
    const auto ndim = static_cast<int64_t>(sizes.size());
    const Placements from = draw_placements(draw, ndim, shape, ReduceOp::kMax);
    const Placements to = draw_placements(draw, ndim, shape, ReduceOp::kMax);
    const RedistributionPlan plan(sizes, shape, from, to);
    INFO(fmt::format("({}) from {} to {} on a mesh of ({})", fmt::join(sizes, ", "), to_string(from), to_string(to),
                     fmt::join(shape, ", ")));
    MeshDims all;
    for (size_t m = 0; m < shape.size(); ++m) all.set(m);
    for_each_rank(Sizes(shape.size(), 0), shape, all, [&](const Sizes& coordinates) {
      CHECK(plan.held(coordinates, plan.steps().size()) == plan.wanted(coordinates));
      if (plan.moves_nothing()) CHECK(plan.start(coordinates) == plan.wanted(coordinates));
      return true;
    });
  }
}

}  // namespace fsdp::test
