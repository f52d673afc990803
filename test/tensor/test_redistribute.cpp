#include <catch2/catch.hpp>

#include "fsdp/dtensor.hpp"
#include "fsdp/error.hpp"
#include "support/split_log.hpp"
#include "support/error_of.hpp"
#include "support/ranks.hpp"
#include "whole_tensors.hpp"

namespace fsdp::test {
namespace {

using Catch::Contains;
using Catch::StartsWith;
using Sizes = std::vector<int64_t>;
using Placements = std::vector<Placement>;

/// Which of the ranks that share a piece this one is, counted over the mesh dimensions that are Partial.
int64_t summand_index(const DeviceMesh& mesh, const Placements& placements) {
  int64_t index = 0;
  for (int m = 0; m < mesh.ndim(); ++m)
    if (std::holds_alternative<Partial>(placements[m])) index = index * mesh.size(m) + mesh.get_local_rank(m);
  return index;
}

int64_t summands(const DeviceMesh& mesh, const Placements& placements) {
  int64_t count = 1;
  for (int m = 0; m < mesh.ndim(); ++m)
    if (std::holds_alternative<Partial>(placements[m])) count *= mesh.size(m);
  return count;
}

bool is_partial(const Placements& placements) {
  return std::any_of(placements.begin(), placements.end(),
                     [](const Placement& placement) { return std::holds_alternative<Partial>(placement); });
}

/// A tensor with these placements: where they are Partial, summand k is `whole` + k.
DTensor spread(const at::Tensor& whole, const DeviceMesh& mesh, const Placements& placements) {
  const auto cuts = without_partial(placements);
  if (!is_partial(placements)) return distribute_tensor(whole, mesh, cuts);
  const at::Tensor local = distribute_tensor(whole + summand_index(mesh, placements), mesh, cuts).to_local();
  return DTensor::from_local(local.to(whole.scalar_type()), mesh, placements, whole.sizes(), whole.strides());
}

/// What these are the summands of.
at::Tensor combined(const at::Tensor& whole, const DeviceMesh& mesh, const Placements& placements, ReduceOp op) {
  if (!is_partial(placements)) return whole;
  const int64_t n = summands(mesh, placements);
  const at::Tensor result = op == ReduceOp::kMin   ? whole
                            : op == ReduceOp::kMax ? whole + (n - 1)
                                                   : whole * n + n * (n - 1) / 2;
  return result.to(whole.scalar_type());
}

struct Drawn {
  at::Tensor whole;
  ReduceOp op = ReduceOp::kSum;
  Placements from, to;

  std::string text() const { return describe(whole, from) + " to " + to_string(to); }
};

Drawn draw_case(Draw& draw, const Sizes& shape) {
  Drawn drawn;
  const Sizes sizes = draw.sizes(0, 3, 9);
  const auto ndim = static_cast<int64_t>(sizes.size());
  drawn.op = draw.one_of<ReduceOp>({ReduceOp::kSum, ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kMin});
  const bool reduces = draw.between(0, 1) == 0;
  const std::vector<c10::ScalarType> reducible = {torch::kDouble, torch::kLong, torch::kInt};
  drawn.whole = counting(sizes, draw.one_of(reduces ? reducible : kDtypes));
  if (ndim > 1 && draw.between(0, 2) == 0) drawn.whole = drawn.whole.transpose(0, 1).contiguous().transpose(0, 1);
  drawn.from = reduces ? draw_placements(draw, ndim, shape, drawn.op) : draw_cuts(draw, ndim, shape);
  drawn.to = reduces ? draw_placements(draw, ndim, shape, drawn.op) : draw_cuts(draw, ndim, shape);
  return drawn;
}

void check_case(Rank& rank, const DeviceMesh& mesh, const Drawn& drawn) {
  const DTensor tensor = spread(drawn.whole, mesh, drawn.from);
  const at::Tensor before = tensor.to_local().clone();
  const at::Tensor expected = combined(drawn.whole, mesh, drawn.from, drawn.op);
  const DTensor moved = tensor.redistribute(drawn.to);
  rank.check(moved.placements() == drawn.to, drawn.text() + ": other placements");
  rank.check(moved.sizes() == drawn.whole.sizes() && moved.strides() == tensor.strides(), drawn.text() + ": metadata");
  const at::Tensor piece = distribute_tensor(expected, mesh, without_partial(drawn.to)).to_local();
  if (is_partial(drawn.to))
    rank.check(moved.to_local().sizes() == piece.sizes(), drawn.text() + ": sizes of the summand");
  else
    rank.check(is_same(moved.to_local(), piece), drawn.text() + ": another piece");
  rank.check(is_same(moved.full_tensor(), expected), drawn.text() + ": another whole");
  const DTensor back = moved.redistribute(drawn.from);
  rank.check(is_same(back.full_tensor(), expected), drawn.text() + " and back: another whole");
  if (!is_partial(drawn.from))
    rank.check(is_same(back.to_local(), tensor.to_local()), drawn.text() + " and back: another piece");
  rank.check(is_same(tensor.to_local(), before), drawn.text() + ": changed what it was given");
}

void check_cases(const Sizes& shape, uint64_t seed, int repeats) {
  INFO("FSDP_TEST_SEED=" << seed << ", mesh " << c10::IntArrayRef(shape));
  on_ranks(static_cast<int>(c10::multiply_integers(shape)), [&](Rank& rank) {
    Draw draw(seed);
    const DeviceMesh mesh = mesh_of(rank.world(), shape);
    for (int repeat = 0; repeat < repeats; ++repeat) check_case(rank, mesh, draw_case(draw, shape));
  });
}

DTensor silent_rows() {
  return distribute_tensor(torch::arange(6.0), mesh_of(SplitLog::world(0, 2), {2}), {Shard{0}});
}

std::string redistribute_error(const DTensor& tensor, const Placements& placements, const Placements& gradient = {}) {
  return error_of<UsageError>([&] { tensor.redistribute(placements, gradient); });
}

}  // namespace

TEST_CASE("any placements to any others give what distributing the whole gives", "[tensor][redistribute]") {
  const uint64_t seed = draw_seed();
  for (size_t i = 0; i < kMeshShapes.size(); ++i) check_cases(kMeshShapes[i], seed + i, 60);
}

TEST_CASE("rows become columns", "[tensor][redistribute]") {
  on_ranks(3, [](Rank& rank) {
    const at::Tensor whole = torch::arange(20).reshape({4, 5});
    const DTensor columns = distribute_tensor(whole, rank.mesh(), {Shard{0}}).redistribute({Shard{-1}});
    rank.check(columns.placements() == Placements{Shard{1}}, "placements");
    const int64_t begin = 2 * rank.index();
    rank.check_identical(columns.to_local(), whole.narrow(1, begin, std::min<int64_t>(2, 5 - begin)), "columns");
    rank.check(columns.to_local().is_contiguous(), "memory");
  });
}

TEST_CASE("a Partial sum of a whole is the value on rank 0 and zeros elsewhere", "[tensor][redistribute]") {
  on_ranks(4, [](Rank& rank) {
    const DeviceMesh mesh = mesh_of(rank.world(), {2, 2});
    for (const auto dtype : {torch::kFloat, torch::kLong, torch::kBool}) {
      const at::Tensor whole = counting({3, 2}, dtype);
      const DTensor tensor = distribute_tensor(whole, mesh, {Replicate{}, Replicate{}});
      const at::Tensor summand = tensor.redistribute({Replicate{}, Partial{}}).to_local();
      rank.check_identical(summand, mesh.get_local_rank(1) == 0 ? whole : torch::zeros_like(whole), "summand");
      const at::Tensor largest = tensor.redistribute({Replicate{}, Partial{ReduceOp::kMax}}).to_local();
      rank.check_identical(largest, whole, "what is combined by its maximum");
    }
  });
}

TEST_CASE("a Partial sum of rows is each rank's rows among zeros", "[tensor][redistribute]") {
  on_ranks(2, [](Rank& rank) {
    const at::Tensor whole = torch::arange(1, 4);
    const DTensor tensor = distribute_tensor(whole, rank.mesh(), {Shard{0}});
    const at::Tensor expected = rank.index() == 0 ? torch::tensor({1, 2, 0}) : torch::tensor({0, 0, 3});
    rank.check_identical(tensor.redistribute({Partial{}}).to_local(), expected, "summand");
    rank.check_identical(tensor.redistribute({Partial{ReduceOp::kMin}}).to_local(), whole, "for a minimum");
  });
}

TEST_CASE("bools are combined with or, and with and for a minimum", "[tensor][redistribute]") {
  on_ranks(4, [](Rank& rank) {
    const int r = rank.index();
    const at::Tensor local = torch::tensor({r == 1, true, false, r != 2, r == 3, false});
    const at::Tensor any = torch::tensor({true, true, false, true, true, false});
    const at::Tensor all = torch::tensor({false, true, false, false, false, false});
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kMin}) {
      const DTensor tensor = DTensor::from_local(local, rank.mesh(), {Partial{op}});
      const at::Tensor expected = op == ReduceOp::kMin ? all : any;
      rank.check_identical(tensor.redistribute({Replicate{}}).to_local(), expected, "whole");
      rank.check_identical(tensor.redistribute({Shard{0}}).to_local(),
                           distribute_tensor(expected, rank.mesh(), {Shard{0}}).to_local(), "rows");
    }
  });
}

TEST_CASE("complex and half-precision summands add up", "[tensor][redistribute]") {
  on_ranks(3, [](Rank& rank) {
    for (const auto dtype : {torch::kComplexFloat, torch::kComplexDouble, torch::kHalf, torch::kBFloat16}) {
      const at::Tensor whole = counting({4, 3}, dtype);
      // Conjugates are lazy views.
      const c10::complex<double> turned(0, rank.index()), total(0, -3);
      const at::Tensor local = c10::isComplexType(dtype) ? (whole * turned).conj() : whole;
      const at::Tensor sum = c10::isComplexType(dtype) ? whole * total : whole * 3;
      const DTensor tensor = DTensor::from_local(local, rank.mesh(), {Partial{}});
      rank.check_identical(tensor.redistribute({Replicate{}}).to_local(), sum, c10::toString(dtype));
      const at::Tensor column = tensor.redistribute({Shard{1}}).to_local();
      rank.check_identical(column, sum.narrow(1, rank.index(), 1), c10::toString(dtype));
    }
  });
}

TEST_CASE("a Partial of one operation becomes one of another", "[tensor][redistribute]") {
  on_ranks(3, [](Rank& rank) {
    const at::Tensor local = torch::tensor({rank.index(), -rank.index()});
    const DTensor largest = DTensor::from_local(local, rank.mesh(), {Partial{ReduceOp::kMax}});
    const DTensor sum = largest.redistribute({Partial{}});
    rank.check_identical(sum.full_tensor(), torch::tensor({2, 0}), "maximum as a sum");
    rank.check_identical(sum.to_local(), rank.index() == 0 ? torch::tensor({2, 0}) : torch::tensor({0, 0}), "summand");
  });
}

TEST_CASE("new pieces lie in memory as the whole does", "[tensor][redistribute]") {
  on_ranks(2, [](Rank& rank) {
    const at::Tensor image = torch::rand({4, 3, 2, 2}).contiguous(at::MemoryFormat::ChannelsLast);
    const DTensor tensor = distribute_tensor(image, rank.mesh(), {Shard{0}});
    for (const Placement& placement : {Placement(Shard{1}), Placement(StridedShard{0, 2}), Placement(Replicate{})}) {
      const at::Tensor piece = tensor.redistribute({placement}).to_local();
      rank.check(piece.is_contiguous(at::MemoryFormat::ChannelsLast), to_string(placement));
    }
  });
}

TEST_CASE("memory is shared only where no rank's piece changes", "[tensor][redistribute]") {
  on_ranks(2, [](Rank& rank) {
    const DTensor tensor = distribute_tensor(torch::rand({1, 3}), rank.mesh(), {Replicate{}});
    rank.check(tensor.redistribute({Replicate{}}).to_local().is_alias_of(tensor.to_local()), "the same");
    // Rank 0 keeps all of the one row, but the others do not.
    rank.check(!tensor.redistribute({Shard{0}}).to_local().is_alias_of(tensor.to_local()), "rows");
  });
}

TEST_CASE("meta tensors stay meta and say nothing", "[tensor][redistribute]") {
  const DeviceMesh mesh = mesh_of(SplitLog::world(1, 4), {2, 2});
  const DTensor tensor = distribute_tensor(torch::empty({5, 3}, torch::kMeta), mesh, {Shard{0}, Shard{1}});
  const DTensor moved = tensor.redistribute({StridedShard{0, 2}, Shard{0}});
  CHECK(moved.to_local().is_meta());
  CHECK(moved.to_local().sizes() == Sizes{1, 3});
  CHECK(tensor.redistribute({Partial{}, Replicate{}}).to_local().sizes() == Sizes{5, 3});
}

TEST_CASE("redistribute refuses what it cannot mean, before it communicates", "[tensor][redistribute]") {
  const DTensor rows = silent_rows();
  CHECK_THAT(error_of<UsageError>([] { DTensor().redistribute({Replicate{}}); }),
             Contains("redistribute") && Contains("undefined") && Contains("from_local"));
  CHECK_THAT(redistribute_error(rows, {}), Contains("redistribute: expected one placement for each dimension"));
  CHECK_THAT(redistribute_error(rows, {Shard{1}}), Contains("redistribute: Shard(1)") && Contains("[-1, 1)"));
  CHECK_THAT(redistribute_error(rows, {StridedShard{0, 0}}), Contains("split factor"));
  CHECK_THAT(redistribute_error(rows, {Replicate{}}, {Shard{0}}),
             Contains("grad_placements") && Contains("got (Shard(0))") && Contains("placed as (Replicate())"));
  CHECK_THAT(redistribute_error(rows, {Shard{0}}, {Replicate{}}), Contains("grad_placements"));
  CHECK_THAT(redistribute_error(rows, {Replicate{}}, {Partial{ReduceOp::kMax}}), Contains("got (Partial(max))"));
  CHECK_THAT(redistribute_error(rows, {Replicate{}}, {Replicate{}, Replicate{}}),
             Contains("redistribute: grad_placements: expected one placement"));
  CHECK_THAT(error_of<UsageError>([&] { rows.full_tensor({Shard{0}}); }), Contains("full_tensor: expected grad_"));
}

TEST_CASE("a maximum of complex numbers is refused", "[tensor][redistribute]") {
  const DeviceMesh mesh = mesh_of(SplitLog::world(0, 2), {2});
  const DTensor tensor =
      DTensor::from_local(torch::zeros({2}, torch::kComplexFloat), mesh, {Partial{ReduceOp::kMax}});
  CHECK_THAT(redistribute_error(tensor, {Replicate{}}),
             Contains("Partial(max)") && Contains("complex numbers") && Contains("ComplexFloat"));
}

TEST_CASE("a maximum that autograd would record is refused with the way out", "[tensor][redistribute]") {
  const DeviceMesh mesh = mesh_of(SplitLog::world(0, 2), {2});
  const at::Tensor leaf = torch::zeros({2}, torch::requires_grad());
  const DTensor tensor = DTensor::from_local(leaf, mesh, {Partial{ReduceOp::kMin}});
  CHECK_THAT(redistribute_error(tensor, {Replicate{}}),
             Contains("Partial(min)") && Contains("autograd") && Contains("detach it first"));
  CHECK_THAT(error_of<UsageError>([&] { tensor.full_tensor(); }), StartsWith("full_tensor: ") && Contains("Partial(min)"));
  CHECK(tensor.redistribute({Partial{ReduceOp::kMin}}).is_same(tensor));
}

}  // namespace fsdp::test
