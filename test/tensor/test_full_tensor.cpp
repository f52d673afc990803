#include <catch2/catch.hpp>

#include "fsdp/dtensor.hpp"
#include "support/ranks.hpp"
#include "whole_tensors.hpp"

namespace fsdp::test {
namespace {

using Sizes = std::vector<int64_t>;

/// Whole tensors of all dtypes, cut over `shape` and put together again.
void check_round_trips(const Sizes& shape, uint64_t seed, int repeats) {
  INFO("FSDP_TEST_SEED=" << seed << ", mesh " << c10::IntArrayRef(shape));
  on_ranks(static_cast<int>(c10::multiply_integers(shape)), [&](Rank& rank) {
    Draw draw(seed);
    const DeviceMesh mesh = mesh_of(rank.world(), shape);
    for (int repeat = 0; repeat < repeats; ++repeat) {
      const Sizes sizes = draw.sizes(0, 3, 9);
      at::Tensor whole = counting(sizes, draw.one_of(kDtypes));
      if (sizes.size() > 1 && draw.between(0, 2) == 0) whole = whole.transpose(0, 1).contiguous().transpose(0, 1);
      const auto placements = draw_cuts(draw, static_cast<int64_t>(sizes.size()), shape);
      const DTensor tensor = distribute_tensor(whole, mesh, placements);
      const at::Tensor full = tensor.full_tensor();
      rank.check(is_same(full, whole), describe(whole, placements) + ": another tensor came back");
      if (whole.numel() > 1)
        rank.check_equal(full.strides().vec(), whole.strides().vec(), describe(whole, placements) + ": strides");
    }
  });
}

}  // namespace

TEST_CASE("5 rows over 4 ranks come back whole, without padding", "[tensor][full_tensor]") {
  on_ranks(4, [](Rank& rank) {
    const Sizes rows = {2, 2, 1, 0};
    const at::Tensor local = torch::full({rows[rank.index()], 2}, rank.index());
    const at::Tensor full = DTensor::from_local(local, rank.mesh(), {Shard{0}}, Sizes{5, 2}).full_tensor();
    rank.check_identical(full.select(1, 0), torch::tensor({0, 0, 1, 1, 2}), "first column");
    rank.check(full.is_contiguous(), "contiguous");
    rank.check_equal(rank.log().calls.size(), size_t{1}, "collectives");
  });
}

TEST_CASE("the padding that is sent is zero", "[tensor][full_tensor]") {
  // Fills new memory with NaN, which would else often be zero by chance.
  at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/false);
  on_ranks(4, [](Rank& rank) {
    const at::Tensor whole = torch::ones({5, 2});
    const at::Tensor full = distribute_tensor(whole, rank.mesh(), {Shard{0}}).full_tensor();
    // The gathered buffer goes on behind the 5 rows, up to 4 ranks' 2 rows.
    rank.check_identical(full.as_strided({8, 2}, {2, 1}).narrow(0, 5, 3), torch::zeros({3, 2}), "padding");
  });
  at::globalContext().setDeterministicAlgorithms(false, /*warn_only=*/false);
}

TEST_CASE("any tensor of any dtype comes back from a 1-D mesh", "[tensor][full_tensor]") {
  const uint64_t seed = draw_seed();
  for (int64_t world_size = 1; world_size <= 8; ++world_size) check_round_trips({world_size}, seed + world_size, 60);
}

TEST_CASE("any tensor of any dtype comes back from a 2-D mesh", "[tensor][full_tensor]") {
  const uint64_t seed = draw_seed();
  for (const Sizes& shape : std::vector<Sizes>{{2, 2}, {2, 3}, {1, 4}, {4, 1}, {2, 4}})
    check_round_trips(shape, seed + shape[0] * 10 + shape[1], 60);
}

TEST_CASE("summands add up, in every dtype that can be added", "[tensor][full_tensor]") {
  on_ranks(3, [](Rank& rank) {
    for (const auto dtype : {torch::kFloat, torch::kDouble, torch::kBFloat16, torch::kLong, torch::kInt}) {
      const at::Tensor local = counting({2, 3}, dtype) * (rank.index() + 1);
      const at::Tensor before = local.clone();
      const at::Tensor full = DTensor::from_local(local, rank.mesh(), {Partial{}}).full_tensor();
      rank.check_identical(full, counting({2, 3}, dtype) * 6, c10::toString(dtype));
      rank.check_identical(local, before, "the local summand");
    }
  });
}

TEST_CASE("maxima and minima combine, and sums of bool are an or", "[tensor][full_tensor]") {
  on_ranks(3, [](Rank& rank) {
    const auto combine = [&](const at::Tensor& local, ReduceOp op) {
      return DTensor::from_local(local, rank.mesh(), {Partial{op}}).full_tensor();
    };
    const at::Tensor local = torch::tensor({rank.index(), -rank.index()});
    rank.check_identical(combine(local, ReduceOp::kMax), torch::tensor({2, 0}), "max");
    rank.check_identical(combine(local, ReduceOp::kMin), torch::tensor({0, -2}), "min");
    const at::Tensor flags = torch::tensor({rank.index() == 1, true, false});
    rank.check_identical(combine(flags, ReduceOp::kSum), torch::tensor({true, true, false}), "sum of bool");
    rank.check_identical(combine(flags, ReduceOp::kMax), torch::tensor({true, true, false}), "max of bool");
    rank.check_identical(combine(flags, ReduceOp::kMin), torch::tensor({false, true, false}), "min of bool");
  });
}

TEST_CASE("a sum over one mesh dimension of rows cut over the other", "[tensor][full_tensor]") {
  for (const bool partial_first : {true, false})
    on_ranks(6, [&](Rank& rank) {
      const DeviceMesh mesh = init_device_mesh(rank.world(), partial_first ? Sizes{2, 3} : Sizes{3, 2}, {"a", "b"});
      const int shard_dim = partial_first ? 1 : 0;
      const std::vector<Placement> placements =
          partial_first ? std::vector<Placement>{Partial{}, Shard{0}} : std::vector<Placement>{Shard{0}, Partial{}};
      // 5 rows over 3 ranks: 2, 2 and 1; the two summands are once and twice the whole.
      const at::Tensor whole = torch::arange(10.0).reshape({5, 2});
      const int64_t begin = 2 * mesh.get_local_rank(shard_dim);
      const at::Tensor local = whole.narrow(0, begin, std::min<int64_t>(2, 5 - begin)) *
                               (mesh.get_local_rank(1 - shard_dim) + 1);
      const at::Tensor full = DTensor::from_local(local, mesh, placements, whole.sizes()).full_tensor();
      rank.check_identical(full, whole * 3, "three times the whole");
    });
}

TEST_CASE("a tensor that is whole already is not copied", "[tensor][full_tensor]") {
  on_ranks(2, [](Rank& rank) {
    const at::Tensor local = torch::rand({3});
    rank.check(DTensor::from_local(local, rank.mesh(), {Replicate{}}).full_tensor().is_alias_of(local), "replicated");
  });
  on_ranks(1, [](Rank& rank) {
    const at::Tensor local = torch::rand({3});
    rank.check(DTensor::from_local(local, rank.mesh(), {Shard{0}}).full_tensor().is_alias_of(local), "one rank");
    rank.check_equal(rank.log().calls.size(), size_t{0}, "collectives");
  });
}

TEST_CASE("full_tensor records nothing where autograd is off or has nothing to do", "[tensor][full_tensor]") {
  on_ranks(2, [](Rank& rank) {
    const at::Tensor local = torch::rand({3});
    rank.check(!DTensor::from_local(local, rank.mesh(), {Shard{0}}).full_tensor().requires_grad(), "no gradient");
    const at::Tensor leaf = torch::rand({3}, torch::requires_grad());
    const torch::NoGradGuard no_grad;
    rank.check(!DTensor::from_local(leaf, rank.mesh(), {Shard{0}}).full_tensor().requires_grad(), "gathered");
    rank.check(!DTensor::from_local(leaf, rank.mesh(), {Replicate{}}).full_tensor().requires_grad(), "whole");
  });
}

}  // namespace fsdp::test
