#include <catch2/catch.hpp>

#include "fsdp/dtensor.hpp"
#include "fsdp/error.hpp"
#include "mesh/merged_mesh.hpp"
#include "support/draw.hpp"
#include "support/printed.hpp"
#include "support/ranks.hpp"
#include "tensor/full_tensor.hpp"
#include "tensor/shard_part.hpp"
#include "tensor/tensor_part.hpp"

namespace fsdp::test {
namespace {

/// Tensor parallelism of one or two dimensions behind a data-parallel one, and where each cuts.
struct PartCase {
  std::vector<int64_t> shape;  ///< (dp, tp...)
  std::vector<int64_t> sizes;
  std::vector<Placement> placements;  ///< of tensor parallelism
  int64_t dim = 0;                    ///< that data parallelism cuts
};

PartCase drawn(Draw& draw) {
  PartCase c{.shape = draw.one_of<std::vector<int64_t>>({{2, 2}, {3, 2}, {2, 3}, {1, 2}, {2, 1}, {2, 2, 2}, {2, 1, 3}}),
             .sizes = draw.sizes(1, 3, 7),
             .placements = {}};
  const auto last = static_cast<int64_t>(c.sizes.size()) - 1;
  for (size_t m = 1; m < c.shape.size(); ++m)
    c.placements.push_back(draw.between(0, 3) == 0 ? Placement(Replicate{}) : Placement(Shard{draw.between(0, last)}));
  c.dim = draw.between(0, last);
  return c;
}

void check(Rank& rank, const PartCase& c) {
  const std::vector<std::string> names{"dp", "tp", "ep"};
  const DeviceMesh mesh = init_device_mesh(rank.world(), c.shape, {names.begin(), names.begin() + static_cast<ptrdiff_t>(c.shape.size())});
  const DeviceMesh tp = c.shape.size() == 2 ? mesh["tp"] : mesh.submesh({"tp", "ep"});
  const auto whole = torch::arange(c10::multiply_integers(c.sizes)).view(c.sizes);
  const auto local = distribute_tensor(whole, tp, c.placements).to_local();
  const auto what = fmt::format("({}) as {} on {}, dim {}", fmt::join(c.sizes, ", "), to_string(c.placements), mesh.to_string(), c.dim);

  const auto part = make_tensor_part(local, tp, joined_mesh(mesh["dp"], tp), c.placements, c.sizes, "weight");
  rank.check_identical(full_of(part.spec("weight"), local, "full_tensor"), whole, what + ": gathered");
  rank.check_identical(part.part_of(whole), local, what + ": taken");
  rank.check(part.whole_mesh == mesh, what + ": mesh");

  // What data parallelism then cuts is what the DTensor says that this rank holds.
  const ShardLayout layout(local.sizes(), local.strides(), c.dim, static_cast<int>(c.shape[0]));
  const auto rows = part_of(layout, local, static_cast<int>(mesh.get_local_rank(0)));
  const auto joined = DTensor::from_local(rows, mesh, part.with({Shard{c.dim}}), c.sizes);
  rank.check_identical(joined.full_tensor(), whole, what + ": the DTensor");
  rank.check(part.in_whole(element_ranges(layout, static_cast<int>(mesh.get_local_rank(0)))) == joined.element_ranges(), what + ": ranges");
}

}  // namespace

TEST_CASE("a tensor-parallel tensor cut further is the DTensor of both", "[tensor][tensor_part]") {
  const uint64_t seed = draw_seed();
  INFO("FSDP_TEST_SEED=" << seed);
  Draw draw(seed);
  for (int i = 0; i < 150; ++i) {
    const PartCase c = drawn(draw);
    CHECK(on_ranks(static_cast<int>(c10::multiply_integers(c.shape)), [&](Rank& rank) { check(rank, c); }));
  }
}

TEST_CASE("sizes are the local ones times the ranks, unless they are given", "[tensor][tensor_part]") {
  on_ranks(4, [](Rank& rank) {
    const DeviceMesh mesh = init_device_mesh(rank.world(), {2, 2}, {"dp", "tp"});
    const auto part = make_tensor_part(torch::ones({3, 5}), mesh["tp"], mesh, {Shard{-1}}, {}, "weight");
    rank.check_equal(part.sizes, std::vector<int64_t>{3, 10}, "sizes");
    rank.check(part.placements == std::vector<Placement>{Shard{1}}, "counted from the front");
    const auto turned = make_tensor_part(torch::ones({5, 3}).t(), mesh["tp"], mesh, {Shard{0}}, {}, "weight");
    rank.check_equal(turned.strides, std::vector<int64_t>{1, 6}, "strides keep their order");
    rank.check_throws<UsageError>([&] { make_tensor_part(torch::ones({}), mesh["tp"], mesh, {Shard{0}}, {}, "scale"); },
                                  {"scale", "0 dimension(s)"}, "a scalar cannot be cut");
    rank.check_throws<UsageError>([&] { make_tensor_part(torch::ones({3}), mesh["tp"], mesh, {Shard{0}}, {8}, "weight"); },
                                  {"weight", "(8)", "(4)", "(3)"}, "chunks of ceil(n / ranks)");
  });
}

}  // namespace fsdp::test
