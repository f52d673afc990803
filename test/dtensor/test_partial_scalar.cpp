#include <catch2/catch.hpp>

#include <limits>

#include "dtensor/partial_scalar.hpp"
#include "programs.hpp"

namespace fsdp::test {
namespace {

using Kind = Combination::Kind;
using Names = std::vector<std::string>;

std::vector<std::shared_ptr<Communicator>> groups_of(const Rank& rank) { return {rank.mesh().get_group(0)}; }

PartialScalar::Ptr wait(const Rank& rank, const at::Tensor& part, Combination combination, const std::string& subject) {
  return PartialScalar::wait(part, combination, groups_of(rank), subject);
}

}  // namespace

TEST_CASE("all scalars that wait are read with one collective", "[dtensor][partial_scalar]") {
  on_ranks(3, [](Rank& rank) {
    const auto own = torch::tensor(rank.index() + 1.0);
    const auto sum = wait(rank, own, {.kind = Kind::kSum, .dtype = torch::kDouble}, "sum of a");
    const auto largest = wait(rank, own.to(torch::kInt), {.kind = Kind::kMax, .dtype = torch::kInt}, "max of b");
    const auto any = wait(rank, torch::tensor(rank.index() == 1), {.kind = Kind::kAny, .dtype = torch::kBool}, "any of c");
    rank.check(rank.calls().empty(), "nothing is communicated before one is read");
    rank.check_identical(largest->read(), torch::tensor(3, torch::kInt), "maximum");
    rank.check_equal(rank.calls(), Names{"all_gather sum of a and 2 more"}, "collectives");
    rank.check_identical(sum->read(), torch::tensor(6.0), "sum");
    rank.check_identical(any->read(), torch::tensor(true), "any");
    rank.check(sum->read().is_same(sum->read()), "the same tensor each time");
    rank.check_equal(rank.calls().size(), size_t{1}, "collectives in the end");
  });
}

TEST_CASE("a scalar that a rank has let go of is reduced with the others", "[dtensor][partial_scalar]") {
  on_ranks(2, [](Rank& rank) {
    const Combination sum{.kind = Kind::kSum, .dtype = torch::kFloat};
    auto dropped = wait(rank, torch::tensor(5.0F), sum, "dropped");
    if (rank.index() == 0) dropped = nullptr;  // ranks let go at times of their own
    const auto kept = wait(rank, torch::tensor(1.0F), sum, "kept");
    rank.check_identical(kept->read(), torch::tensor(2.0F), "kept");
    rank.check_equal(rank.calls(), Names{"all_gather dropped and 1 more"}, "collectives");
    if (dropped) rank.check_identical(dropped->read(), torch::tensor(10.0F), "still held");
  });
}

TEST_CASE("a scalar that is made after the others were read waits anew", "[dtensor][partial_scalar]") {
  on_ranks(2, [](Rank& rank) {
    const Combination sum{.kind = Kind::kSum, .dtype = torch::kFloat};
    wait(rank, torch::tensor(1.0F), sum, "first")->read();
    rank.check_identical(wait(rank, torch::tensor(2.0F), sum, "second")->read(), torch::tensor(4.0F), "second");
    rank.check_equal(rank.calls(), Names{"all_gather first", "all_gather second"}, "collectives");
  });
}

TEST_CASE("each kind combines the ranks' parts to the whole's value", "[dtensor][partial_scalar]") {
  const auto parts = torch::tensor({{3.0F}, {-4.0F}, {0.5F}});
  const auto combined = [&](Combination combination) { return combination.combine(parts).item<float>(); };
  CHECK(combined({.kind = Kind::kSum}) == -0.5F);
  CHECK(combined({.kind = Kind::kSum, .divisor = 2}) == -0.25F);
  CHECK(combined({.kind = Kind::kProd}) == -6.0F);
  CHECK(combined({.kind = Kind::kMax}) == 3.0F);
  CHECK(combined({.kind = Kind::kMin}) == -4.0F);
  CHECK(combined({.kind = Kind::kNorm, .p = 1}) == 7.5F);
  CHECK(combined({.kind = Kind::kNorm, .p = std::numeric_limits<double>::infinity()}) == 4.0F);
  CHECK(Combination{.kind = Kind::kAny, .dtype = torch::kBool}.combine(parts > 1).item<bool>());
  CHECK_FALSE(Combination{.kind = Kind::kAll, .dtype = torch::kBool}.combine(parts > 1).item<bool>());
}

TEST_CASE("a rank without elements adds what changes nothing", "[dtensor][partial_scalar]") {
  for (const auto kind : {Kind::kSum, Kind::kProd, Kind::kMax, Kind::kMin, Kind::kAny, Kind::kAll, Kind::kNorm})
    for (const auto dtype : {torch::kFloat, torch::kDouble, torch::kLong, torch::kByte, torch::kBool}) {
      if (kind == Kind::kNorm && !at::isFloatingType(dtype)) continue;
      const Combination combination{.kind = kind, .dtype = dtype};
      const auto part = torch::ones({1, 2}, dtype);
      const auto neutral = combination.neutral({1, 2}, part.options());
      INFO(static_cast<int>(kind) << " of " << dtype);
      CHECK(at::equal(combination.combine(at::cat({part, neutral})), combination.combine(part)));
    }
}

TEST_CASE("a sum of half precision is rounded once", "[dtensor][partial_scalar]") {
  on_ranks(2, [](Rank& rank) {
    // 2048 + 1 is no half; 2048 + 2 is. Each rank's part rounded by itself would lose both ones.
    const auto whole = torch::cat({torch::full({1}, 2048), torch::ones({1}), torch::ones({1}), torch::zeros({1})}).to(torch::kHalf);
    const auto tensor = distribute_tensor(whole, rank.mesh(), {Shard{0}});
    rank.check_identical(whole_of(tensor.sum()), torch::tensor(2050.0).to(torch::kHalf), "sum");
  });
}

TEST_CASE("scalars over two mesh dimensions travel over one after the other", "[dtensor][partial_scalar]") {
  on_ranks(4, [](Rank& rank) {
    const auto mesh = mesh_of(rank.world(), {2, 2});
    rank.log().clear();
    const auto sum = PartialScalar::wait(torch::tensor(std::pow(10.0, rank.index())), {.kind = Kind::kSum, .dtype = torch::kDouble},
                                         {mesh.get_group(1), mesh.get_group(0)}, "sum");
    rank.check_identical(sum->read(), torch::tensor(1111.0), "sum");
    rank.check_equal(rank.calls().size(), size_t{2}, "collectives");
  });
}

TEST_CASE("where the collective fails the scalars go on waiting and it fails for the next reader too", "[dtensor][partial_scalar]") {
  std::atomic<int> failures = 0;
  try {
    run_ranks(2, [&](const std::shared_ptr<Communicator>& world) {
      if (world->rank() == 1) throw std::runtime_error("this rank is gone");
      const auto sum = PartialScalar::wait(torch::tensor(1.0F), {.kind = Kind::kSum, .dtype = torch::kFloat}, {world}, "sum");
      for (int i = 0; i < 2; ++i) {
        try {
          sum->read();
        } catch (const std::exception&) {
          ++failures;
        }
      }
    });
  } catch (const std::runtime_error&) {
  }
  CHECK(failures == 2);
}

}  // namespace fsdp::test
