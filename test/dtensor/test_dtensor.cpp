#include <catch2/catch.hpp>

#include "fsdp/dtensor.hpp"
#include "fsdp/error.hpp"
#include "support/printed.hpp"
#include "support/split_log.hpp"
#include "support/error_of.hpp"
#include "support/ranks.hpp"

namespace fsdp::test {
namespace {

using Catch::Contains;
using Sizes = std::vector<int64_t>;

/// This test's thread as one rank of a world that must not communicate.
DeviceMesh silent_mesh(int rank, int world_size) {
  return init_device_mesh(SplitLog::world(rank, world_size), {world_size}, {"shard"});
}

template <class... Args>
std::string from_local_error(Args&&... args) {
  return error_of<UsageError>([&] { DTensor::from_local(std::forward<Args>(args)...); });
}

}  // namespace

TEST_CASE("from_local knows the whole and shares the piece", "[tensor][dtensor]") {
  const at::Tensor local = torch::arange(6).reshape({2, 3});
  const DTensor tensor = DTensor::from_local(local, silent_mesh(1, 4), {Shard{-2}}, Sizes{7, 3});
  CHECK(tensor.defined());
  CHECK(tensor.sizes() == Sizes{7, 3});
  CHECK(tensor.strides() == Sizes{3, 1});
  CHECK(tensor.numel() == 21);
  CHECK(tensor.dtype() == torch::kLong);
  CHECK(tensor.placements() == std::vector<Placement>{Shard{0}});
  CHECK(tensor.mesh().get_local_rank() == 1);
  CHECK(tensor.to_local().is_same(local));
  CHECK_FALSE(DTensor().defined());
}

TEST_CASE("without sizes, sharded dimensions are the mesh size times the local ones", "[tensor][dtensor]") {
  const at::Tensor local = torch::zeros({2, 3});
  CHECK(DTensor::from_local(local, silent_mesh(3, 4), {Shard{1}}).sizes() == Sizes{2, 12});
  CHECK(DTensor::from_local(local, silent_mesh(3, 4), {Partial{}}).sizes() == Sizes{2, 3});
  const DeviceMesh mesh = init_device_mesh(SplitLog::world(0, 6), {2, 3}, {"a", "b"});
  CHECK(DTensor::from_local(local, mesh, {Shard{0}, Shard{0}}).sizes() == Sizes{12, 3});
  CHECK(DTensor::from_local(local, mesh, {Replicate{}, Shard{0}}).strides() == Sizes{3, 1});
}

TEST_CASE("a DTensor may be strided", "[tensor][dtensor]") {
  const DeviceMesh mesh = init_device_mesh(SplitLog::world(2, 4), {2, 2}, {"dp", "tp"});
  const std::vector<Placement> placements = {StridedShard{-2, 2}, Shard{0}};
  // Row 0 of tensor parallelism has 0..2, of which the second rank of FSDP has the last.
  const at::Tensor whole = torch::arange(10).reshape({5, 2});
  const DTensor tensor = distribute_tensor(whole, mesh, placements);
  CHECK(at::equal(tensor.to_local(), whole.narrow(0, 2, 1)));
  CHECK(tensor.placements() == std::vector<Placement>{StridedShard{0, 2}, Shard{0}});
  CHECK(DTensor::from_local(tensor.to_local(), mesh, placements, whole.sizes()).sizes() == whole.sizes());
  CHECK(DTensor::from_local(torch::zeros({2, 2}), mesh, placements).sizes() == Sizes{8, 2});
  CHECK_THAT(from_local_error(torch::zeros({2, 2}), mesh, placements, whole.sizes()),
             Contains("holds sizes (1, 2)") && Contains("StridedShard(dim=0, split_factor=2)"));

  const at::Tensor striped = distribute_tensor(whole, silent_mesh(0, 2), {StridedShard{0, 3}}).to_local();
  CHECK(at::equal(striped, whole.index_select(0, torch::tensor({0, 2, 4}))));
}

TEST_CASE("a rank may hold nothing", "[tensor][dtensor]") {
  const DTensor tensor = DTensor::from_local(torch::zeros({0, 3}), silent_mesh(3, 4), {Shard{0}}, Sizes{5, 3});
  CHECK(tensor.numel() == 15);
  CHECK(DTensor::from_local(torch::zeros({0}), silent_mesh(1, 2), {Shard{0}}, Sizes{}).numel() == 1);
}

TEST_CASE("from_local takes meta tensors and dense strides of any order", "[tensor][dtensor]") {
  const at::Tensor meta = torch::zeros({2, 3}, torch::kMeta);
  const DTensor tensor = DTensor::from_local(meta, silent_mesh(0, 2), {Shard{0}}, Sizes{4, 3}, Sizes{1, 4});
  CHECK(tensor.strides() == Sizes{1, 4});
  CHECK(tensor.full_tensor().is_meta());
  CHECK(tensor.full_tensor().strides() == Sizes{1, 4});
}

TEST_CASE("from_local refuses a piece of another size, naming both", "[tensor][dtensor]") {
  CHECK_THAT(from_local_error(torch::zeros({2, 3}), silent_mesh(2, 4), std::vector<Placement>{Shard{0}}, Sizes{5, 3}),
             Contains("sizes (5, 3)") && Contains("(Shard(0))") && Contains("rank at (2)") &&
                 Contains("DeviceMesh(cpu, shard=4)") && Contains("holds sizes (1, 3)") && Contains("got (2, 3)"));
  CHECK_THAT(from_local_error(torch::zeros({3}), silent_mesh(0, 2), std::vector<Placement>{Replicate{}}, Sizes{4}),
             Contains("holds sizes (4)") && Contains("got (3)"));
  CHECK_THAT(from_local_error(torch::zeros({}), silent_mesh(1, 2), std::vector<Placement>{Shard{0}}, Sizes{}),
             Contains("holds sizes (0)") && Contains("got ()"));
}

TEST_CASE("from_local refuses what is no dense tensor on the mesh's devices", "[tensor][dtensor]") {
  const std::vector<Placement> shard = {Shard{0}};
  CHECK_THAT(from_local_error(at::Tensor(), silent_mesh(0, 2), shard), Contains("undefined"));
  CHECK_THAT(from_local_error(torch::eye(2).to_sparse(), silent_mesh(0, 2), shard),
             Contains("sparse") && Contains("to_dense()"));
  CHECK_THAT(from_local_error(torch::zeros({2}), silent_mesh(0, 2), shard, Sizes{4}, Sizes{2}),
             Contains("strides") && Contains("sizes (4)") && Contains("got (2)") && Contains("leave them out"));
  CHECK_THAT(from_local_error(torch::zeros({2}), silent_mesh(0, 2), shard, Sizes{4}, Sizes{4, 1}), Contains("got (4, 1)"));
  CHECK_THAT(from_local_error(torch::zeros({2}), silent_mesh(0, 2), shard, Sizes{4}, Sizes{-1}), Contains("got (-1)"));
  CHECK_THAT(from_local_error(torch::zeros({}), silent_mesh(0, 2), shard),
             Contains("0-dim") && Contains("empty list"));
  CHECK_THAT(from_local_error(torch::zeros({2}), DeviceMesh(), shard), Contains("undefined") && Contains("mesh"));
  CHECK_THAT(error_of<UsageError>([] { DTensor().full_tensor(); }), Contains("undefined") && Contains("from_local"));
}

TEST_CASE("a rank outside of the mesh has no piece", "[tensor][dtensor]") {
  const DeviceMesh mesh = init_device_mesh(SplitLog::world(2, 3), {2}, {"shard"}, {.ranks = {0, 1}});
  CHECK_THAT(error_of<StateError>([&] { DTensor::from_local(torch::zeros({2}), mesh, {Shard{0}}); }),
             Contains("is_member()"));
}

TEST_CASE("distribute_tensor keeps this rank's rows, as a copy", "[tensor][dtensor]") {
  const at::Tensor whole = torch::arange(10.0).reshape({5, 2});
  const DTensor tensor = distribute_tensor(whole, silent_mesh(1, 4), {Shard{0}});
  CHECK(at::equal(tensor.to_local(), whole.narrow(0, 2, 2)));
  CHECK(tensor.sizes() == whole.sizes());
  tensor.to_local().zero_();
  CHECK(whole.sum().item<double>() == 45);
  CHECK_FALSE(distribute_tensor(whole, silent_mesh(0, 1), {Replicate{}}).to_local().is_alias_of(whole));
  CHECK(distribute_tensor(whole, silent_mesh(3, 4), {Shard{0}}).to_local().sizes() == Sizes{0, 2});
}

TEST_CASE("distribute_tensor keeps strides, dtype and requires_grad", "[tensor][dtensor]") {
  const at::Tensor image = torch::rand({4, 3, 2, 2}).contiguous(at::MemoryFormat::ChannelsLast);
  const DTensor tensor = distribute_tensor(image, silent_mesh(1, 2), {Shard{0}});
  CHECK(tensor.strides() == image.strides());
  CHECK(tensor.to_local().is_contiguous(at::MemoryFormat::ChannelsLast));
  CHECK_FALSE(tensor.to_local().requires_grad());

  const at::Tensor weight = torch::rand({4, 2}, torch::requires_grad());
  const DTensor leaf = distribute_tensor(weight, silent_mesh(1, 2), {Shard{0}});
  CHECK(leaf.requires_grad());
  CHECK(leaf.is_leaf());
  CHECK(leaf.to_local().requires_grad());

  // A view with gaps has no strides that a whole tensor could have.
  CHECK(distribute_tensor(torch::rand({4, 4}).narrow(1, 0, 2), silent_mesh(0, 2), {Shard{0}}).strides() == Sizes{2, 1});
  CHECK(distribute_tensor(torch::ones({1}).expand({4}), silent_mesh(0, 2), {Shard{0}}).strides() == Sizes{1});
}

TEST_CASE("distribute_tensor gives a 0-dim tensor to the first rank", "[tensor][dtensor]") {
  const at::Tensor scalar = torch::tensor(3.5);
  CHECK(at::equal(distribute_tensor(scalar, silent_mesh(0, 2), {Shard{0}}).to_local(), scalar));
  CHECK(distribute_tensor(scalar, silent_mesh(1, 2), {Shard{0}}).to_local().sizes() == Sizes{0});
}

TEST_CASE("meta tensors are distributed as meta tensors", "[tensor][dtensor]") {
  const at::Tensor meta = torch::empty({5, 2}, torch::kMeta);
  const DTensor tensor =
      distribute_tensor(meta, silent_mesh(0, 2), {Shard{0}}, DistributeSource::kBroadcastFromRank0);
  CHECK(tensor.to_local().is_meta());
  CHECK(tensor.to_local().sizes() == Sizes{3, 2});
}

TEST_CASE("distribute_tensor refuses Partial and what from_local refuses", "[tensor][dtensor]") {
  const auto message = [](const at::Tensor& tensor, std::vector<Placement> placements) {
    return error_of<UsageError>([&] { distribute_tensor(tensor, silent_mesh(0, 2), placements); });
  };
  CHECK_THAT(message(torch::zeros({2}), {Partial{}}),
             Contains("distribute_tensor") && Contains("got Partial(sum)") && Contains("from_local"));
  CHECK_THAT(message(torch::zeros({2}), {Shard{1}}), Contains("distribute_tensor: Shard(1)"));
  CHECK_THAT(message(torch::zeros({2}), {}), Contains("one placement for each dimension"));
  CHECK_THAT(message(at::Tensor(), {Shard{0}}), Contains("distribute_tensor") && Contains("undefined"));
  CHECK_THAT(message(torch::eye(2).to_sparse(), {Shard{0}}), Contains("sparse"));
}

TEST_CASE("the values of the mesh's first rank win if asked for", "[tensor][dtensor]") {
  for (const auto& [rows, columns] : std::vector<std::pair<int, int>>{{2, 2}, {2, 3}, {1, 4}, {4, 1}})
    on_ranks(rows * columns, [rows = rows, columns = columns](Rank& rank) {
      const at::Tensor own = torch::full({5, 2}, 100.0 * rank.index()) + torch::arange(10).reshape({5, 2});
      const at::Tensor before = own.clone();
      const DeviceMesh mesh = rank.hybrid(rows, columns);
      const DTensor tensor =
          distribute_tensor(own, mesh, {Replicate{}, Shard{0}}, DistributeSource::kBroadcastFromRank0);
      rank.check_identical(tensor.full_tensor(), torch::arange(10.0).reshape({5, 2}), "values");
      rank.check_identical(own, before, "the tensor that was passed");
    });
}

TEST_CASE("only full_tensor and a broadcast communicate", "[tensor][dtensor]") {
  on_ranks(4, [](Rank& rank) {
    const at::Tensor whole = torch::arange(10.0).reshape({5, 2});
    const DTensor tensor = distribute_tensor(whole, rank.mesh(), {Shard{0}});
    DTensor::from_local(tensor.to_local(), rank.mesh(), {Shard{0}}, whole.sizes(), whole.strides());
    DTensor::from_local(whole, rank.mesh(), {Replicate{}}).full_tensor();
    distribute_tensor(torch::zeros({0, 2}), rank.mesh(), {Shard{0}}).full_tensor();
    rank.check_equal(rank.calls(), std::vector<std::string>{}, "silent calls");

    tensor.full_tensor();
    distribute_tensor(whole, rank.mesh(), {Shard{0}}, DistributeSource::kBroadcastFromRank0);
    DTensor::from_local(whole, rank.mesh(), {Partial{}}).full_tensor();
    rank.check_equal(rank.calls(),
                     std::vector<std::string>{"all_gather full_tensor (5, 2)", "broadcast distribute_tensor (5, 2)",
                                              "all_reduce full_tensor (5, 2)"},
                     "calls");
  });
}

}  // namespace fsdp::test
