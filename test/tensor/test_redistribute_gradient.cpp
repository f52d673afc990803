#include <catch2/catch.hpp>

#include "fsdp/dtensor.hpp"
#include "support/ranks.hpp"
#include "whole_tensors.hpp"

namespace fsdp::test {
namespace {

using Sizes = std::vector<int64_t>;
using Placements = std::vector<Placement>;

at::Tensor random_whole(Draw& draw, const Sizes& sizes) {
  const int64_t numel = c10::multiply_integers(sizes);
  std::vector<double> numbers(numel);
  for (double& number : numbers) number = static_cast<double>(draw.between(-1000, 1000)) / 100;
  return torch::tensor(numbers, torch::kDouble).reshape(sizes);
}

at::Tensor piece_of(const at::Tensor& whole, const DeviceMesh& mesh, const Placements& placements) {
  return distribute_tensor(whole, mesh, without_partial(placements)).to_local();
}

/// `whole`, spread, as a leaf; for Partials every rank has all of it.
DTensor leaf_of(const at::Tensor& whole, const DeviceMesh& mesh, const Placements& placements) {
  const DTensor tensor = DTensor::from_local(piece_of(whole, mesh, placements), mesh, placements, whole.sizes());
  tensor.set_requires_grad(true);
  return tensor;
}

using Body = std::function<void(Rank&, const DeviceMesh&, Draw&)>;

/// Runs `body` on each of the meshes, with the same draws on each rank.
void on_meshes(const Body& body) {
  const uint64_t seed = draw_seed();
  INFO("FSDP_TEST_SEED=" << seed);
  for (const Sizes& shape : kMeshShapes)
    on_ranks(static_cast<int>(c10::multiply_integers(shape)), [&](Rank& rank) {
      Draw draw(seed);
      const DeviceMesh mesh = mesh_of(rank.world(), shape);
      for (int repeat = 0; repeat < 15; ++repeat) body(rank, mesh, draw);
    });
}

}  // namespace

TEST_CASE("the gradient of a whole tensor's loss comes back to every piece", "[tensor][redistribute_gradient]") {
  on_meshes([](Rank& rank, const DeviceMesh& mesh, Draw& draw) {
    const Sizes sizes = draw.sizes(0, 3, 5);
    const at::Tensor whole = random_whole(draw, sizes), weights = random_whole(draw, sizes);
    const auto loss_of = [&](const at::Tensor& tensor) { return (tensor.sin() * weights).sum(); };
    const Placements placements = draw_cuts(draw, whole.dim(), mesh.shape());
    const DTensor tensor = leaf_of(whole, mesh, placements);
    loss_of(tensor.full_tensor()).backward();

    const at::Tensor unsharded = whole.detach().set_requires_grad(true);
    loss_of(unsharded).backward();
    const at::Tensor expected = piece_of(unsharded.grad(), mesh, placements);
    rank.check_close(to_local(tensor.grad()), expected, describe(whole, placements));
  });
}

TEST_CASE("gradients come back through any change of placements", "[tensor][redistribute_gradient]") {
  on_meshes([](Rank& rank, const DeviceMesh& mesh, Draw& draw) {
    const Sizes sizes = draw.sizes(0, 3, 5);
    const at::Tensor whole = random_whole(draw, sizes), weights = random_whole(draw, sizes);
    const Placements from = draw_placements(draw, whole.dim(), mesh.shape(), ReduceOp::kSum);
    const Placements to = draw_placements(draw, whole.dim(), mesh.shape(), ReduceOp::kSum);
    const DTensor tensor = leaf_of(whole, mesh, from);
    const at::Tensor moved = tensor.redistribute(to).to_local();
    // The loss is the weighted sum of the whole, each rank adding up its own piece.
    (moved * piece_of(weights, mesh, to)).sum().backward();
    rank.check_close(to_local(tensor.grad()), piece_of(weights, mesh, from),
                     describe(whole, from) + " to " + to_string(to));
  });
}

TEST_CASE("summands of the gradient are added up if asked for", "[tensor][redistribute_gradient]") {
  on_meshes([](Rank& rank, const DeviceMesh& mesh, Draw& draw) {
    const Sizes sizes = draw.sizes(0, 3, 5);
    const at::Tensor whole = random_whole(draw, sizes), weights = random_whole(draw, sizes);
    const Placements placements = draw_placements(draw, whole.dim(), mesh.shape(), ReduceOp::kSum);
    const DTensor tensor = leaf_of(whole, mesh, placements);
    const at::Tensor full = tensor.full_tensor(Placements(placements.size(), Partial{}));
    // Each rank's loss counts (rank + 1) times, as data-parallel ranks' losses on their own data do.
    ((full * weights).sum() * (rank.index() + 1)).backward();
    const int64_t n = rank.size();
    rank.check_close(to_local(tensor.grad()), piece_of(weights * (n * (n + 1) / 2), mesh, placements),
                     describe(whole, placements));
  });
}

TEST_CASE("a second derivative is that of the whole", "[tensor][redistribute_gradient]") {
  on_meshes([](Rank& rank, const DeviceMesh& mesh, Draw& draw) {
    const Sizes sizes = draw.sizes(0, 3, 5);
    const at::Tensor whole = random_whole(draw, sizes);
    const Placements placements = draw_cuts(draw, whole.dim(), mesh.shape());
    const DTensor tensor = leaf_of(whole, mesh, placements);
    const at::Tensor loss = tensor.full_tensor().pow(3).sum();
    const at::Tensor gradient =
        torch::autograd::grad({loss}, {tensor}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
    gradient.pow(2).sum().backward();
    // The gradient is 3 x^2; the sum of its squares, 9 x^4, has the gradient 36 x^3.
    rank.check_close(to_local(tensor.grad()), piece_of(36 * whole.pow(3), mesh, placements),
                     describe(whole, placements));
  });
}

TEST_CASE("a backward sends what the way back sends", "[tensor][redistribute_gradient]") {
  on_ranks(4, [](Rank& rank) {
    const at::Tensor whole = torch::ones({8, 3});
    const auto backward_of = [&](const DTensor& tensor, const at::Tensor& result) {
      rank.log().clear();
      result.sum().backward();
      rank.check(tensor.grad().defined(), "gradient");
      return rank.calls();
    };
    const auto check_calls = [&](const Placements& from, const Placements& gradient,
                                 const std::vector<std::string>& calls) {
      const DTensor tensor = leaf_of(whole, rank.mesh(), from);
      rank.check_equal(backward_of(tensor, tensor.full_tensor(gradient)), calls, to_string(from) + to_string(gradient));
    };
    const std::string subject = " gradient of full_tensor (8, 3)";
    check_calls({Shard{0}}, {}, {});
    check_calls({Shard{0}}, {Partial{}}, {"reduce_scatter" + subject});
    check_calls({Partial{}}, {}, {});
    check_calls({Replicate{}}, {}, {});
    check_calls({Replicate{}}, {Partial{}}, {"all_reduce" + subject});
    const DTensor rows = leaf_of(whole, rank.mesh(), {Shard{0}});
    rank.check_equal(backward_of(rows, rows.redistribute({Shard{1}}).to_local()),
                     std::vector<std::string>{"all_gather gradient of redistribute (8, 3)"}, "columns to rows");
  });
}

TEST_CASE("a whole tensor may be changed in place under autograd", "[tensor][redistribute_gradient]") {
  on_ranks(2, [](Rank& rank) {
    const DTensor tensor = leaf_of(torch::ones({3, 2}), rank.mesh(), {Shard{0}});
    const at::Tensor full = tensor.full_tensor();
    full.mul_(2);
    full.sum().backward();
    rank.check_identical(to_local(tensor.grad()), torch::full_like(to_local(tensor), 2), "gradient");
    rank.check_identical(to_local(tensor), torch::ones_like(to_local(tensor)), "the piece");
  });
}

TEST_CASE("what has a history of its own passes gradients on", "[tensor][redistribute_gradient]") {
  on_ranks(2, [](Rank& rank) {
    const at::Tensor whole = torch::arange(6.0).reshape({3, 2});
    const at::Tensor leaf = piece_of(whole, rank.mesh(), {Shard{0}}).set_requires_grad(true);
    const DTensor squares = DTensor::from_local(leaf * leaf, rank.mesh(), {Shard{0}}, Sizes{3, 2});
    // A whole that is the piece already, and one that has to be gathered.
    const DTensor columns = squares.redistribute({Shard{1}});
    (columns.redistribute({Replicate{}}).full_tensor() * 3).sum().backward();
    rank.check_close(leaf.grad(), 6 * leaf.detach(), "gradient");
  });
}

}  // namespace fsdp::test
