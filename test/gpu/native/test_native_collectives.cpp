// Values of collectives of CUDA tensors over the native NCCL communicator.
#include <fmt/format.h>

#include "comm/scaled_sum.hpp"
#include "native_world.hpp"

namespace fsdp::test {
namespace {

/// Rank r's numbers: small enough that sums of all ranks are exact in 16 bits.
at::Tensor numbers(int rank, int64_t numel, at::ScalarType dtype) {
  return (at::arange(numel, on_device(at::kLong)).remainder(13) + 3 * rank).to(dtype);
}

at::Tensor sum_of_all(int ranks, int64_t numel, at::ScalarType dtype, double scale = 1) {
  at::Tensor sum = at::zeros({numel}, on_device(at::kDouble));
  for (int rank = 0; rank < ranks; ++rank) sum += numbers(rank, numel, dtype).to(at::kDouble) * scale;
  return sum.to(dtype);
}

}  // namespace

TEST_CASE("ranks connect, and gather, reduce and broadcast right values of every size and dtype", "[gpu][collectives]") {
  const auto group = group_of_all();
  const int ranks = group->size(), rank = group->rank();
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble, at::kLong})
    for (const int64_t numel : {1, 37, 1 << 20}) {
      CAPTURE(dtype, numel);
      const auto own = numbers(rank, numel, dtype);
      auto whole = at::zeros({ranks * numel}, on_device(dtype));
      group->start_all_gather(whole, own, "gather")->wait();
      for (int other = 0; other < ranks; ++other)
        CHECK(at::equal(whole.narrow(0, other * numel, numel), numbers(other, numel, dtype)));

      auto piece = at::zeros({numel}, on_device(dtype));
      group->start_reduce_scatter(piece, numbers(rank, ranks * numel, dtype), ReduceOp::kSum, "reduce")->wait();
      CHECK(at::equal(piece, sum_of_all(ranks, ranks * numel, dtype).narrow(0, rank * numel, numel)));

      auto total = own.clone();
      group->start_all_reduce(total, ReduceOp::kSum, "sum")->wait();
      CHECK(at::equal(total, sum_of_all(ranks, numel, dtype)));

      auto told = own.clone();
      group->start_broadcast(told, ranks - 1, "broadcast")->wait();
      CHECK(at::equal(told, numbers(ranks - 1, numel, dtype)));
    }
}

TEST_CASE("a batch of gathers and one of reductions land where they should", "[gpu][collectives]") {
  const auto group = group_of_all();
  if (!group->launches_batches()) return skip("no batches over " + group->backend());
  const int ranks = group->size(), rank = group->rank();
  std::vector<at::Tensor> pieces, wholes, inputs, outputs;
  for (const int64_t numel : {5, 0, 4096}) {
    pieces.push_back(numbers(rank, numel, at::kFloat));
    wholes.push_back(at::zeros({ranks * numel}, on_device()));
    inputs.push_back(numbers(rank, ranks * numel, at::kFloat));
    outputs.push_back(at::zeros({numel}, on_device()));
  }
  const auto gathered = group->start_all_gather_batch(wholes, pieces, "gathers");
  const auto reduced = group->start_reduce_scatter_batch(outputs, inputs, ReduceOp::kSum, "reductions");
  gathered->wait();
  reduced->wait();
  for (size_t i = 0; i < pieces.size(); ++i) {
    const int64_t numel = pieces[i].numel();
    for (int other = 0; other < ranks; ++other)
      CHECK(at::equal(wholes[i].narrow(0, other * numel, numel), numbers(other, numel, at::kFloat)));
    CHECK(at::equal(outputs[i], sum_of_all(ranks, ranks * numel, at::kFloat).narrow(0, rank * numel, numel)));
  }
}

TEST_CASE("averages are made in the collective, and equal the sum of what was scaled", "[gpu][collectives]") {
  const auto group = group_of_all();
  const int ranks = group->size(), rank = group->rank();
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble}) {
    CAPTURE(dtype);
    const double scale = 1.0 / ranks;
    auto* scaled = scaled_sums_of(*group, {.dtype = dtype, .scale = scale});
    if (scaled == nullptr) return skip("sums are not scaled over " + group->backend());
    const int64_t numel = 1000;
    const std::vector<at::Tensor> outputs = {at::zeros({numel}, on_device(dtype))};
    const std::vector<at::Tensor> inputs = {numbers(rank, ranks * numel, dtype)};
    scaled->start_scaled_reduce_scatter(outputs, inputs, scale, "gradients")->wait();
    CHECK(at::equal(outputs[0], sum_of_all(ranks, ranks * numel, dtype, scale).narrow(0, rank * numel, numel)));
    auto total = numbers(rank, numel, dtype);
    scaled->start_scaled_all_reduce(total, scale, "gradients")->wait();
    CHECK(at::equal(total, sum_of_all(ranks, numel, dtype, scale)));
  }
}

TEST_CASE("groups that are split off connect by themselves, also some of one rank", "[gpu][collectives]") {
  const auto group = group_of_all();
  std::vector<int> backwards;
  for (int rank = group->size() - 1; rank >= 0; --rank) backwards.push_back(rank);
  const auto turned = group->split(backwards, "turned");
  auto whole = at::zeros({group->size()}, on_device());
  turned->start_all_gather(whole, at::full({1}, group->rank(), on_device()), "turned")->wait();
  for (int place = 0; place < group->size(); ++place)
    CHECK(whole[place].item<float>() == static_cast<float>(group->size() - 1 - place));
  for (int rank = 0; rank < group->size(); ++rank) {
    const auto alone = group->split(std::vector<int>{rank}, fmt::format("alone{}", rank));
    CHECK((alone != nullptr) == (rank == group->rank()));
    if (!alone) continue;
    auto one = at::full({3}, 5.0F, on_device());
    alone->start_all_reduce(one, ReduceOp::kSum, "alone")->wait();
    CHECK(at::equal(one, at::full({3}, 5.0F, on_device())));
  }
}

}  // namespace fsdp::test
