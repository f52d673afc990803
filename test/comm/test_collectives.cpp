// The values of every collective, over every backend that runs without a device.
#include <catch2/catch.hpp>

#include "rank_results.hpp"

namespace fsdp::test {
namespace {

/// 0, 1, 2, ... plus 100 for each rank.
at::Tensor numbers(int64_t numel, int rank, at::ScalarType dtype = at::kFloat) {
  return (at::arange(numel) + 100 * rank).to(dtype);
}

}  // namespace

TEST_CASE("an all-gather puts rank r's elements at r times their number", "[comm][collectives]") {
  for (const Backend& backend : value_backends())
    for (int size = 1; size <= 5; ++size) {
      CAPTURE(backend.name, size);
      std::vector<at::Tensor> outputs(size);
      const auto errors = backend.run(size, [&](Communicator& world) {
        outputs[world.rank()] = at::zeros({size, 3});
        all_gather(world, outputs[world.rank()], numbers(3, world.rank()));
      });
      CHECK(errors == no_errors(size));
      for (const at::Tensor& output : outputs)
        for (int rank = 0; rank < size; ++rank) CHECK(at::equal(output[rank], numbers(3, rank)));
    }
}

TEST_CASE("an all-gather moves any dtype", "[comm][collectives]") {
  for (const Backend& backend : value_backends())
    for (const auto dtype : {at::kBool, at::kHalf, at::kBFloat16, at::kDouble, at::kLong, at::kByte,
                             at::kShort, at::kComplexFloat, at::kFloat8_e4m3fn}) {
      CAPTURE(backend.name, dtype);
      std::vector<at::Tensor> outputs(2);
      const auto errors = backend.run(2, [&](Communicator& world) {
        outputs[world.rank()] = at::zeros({2, 4}).to(dtype);
        all_gather(world, outputs[world.rank()], numbers(4, world.rank()).to(dtype));
      });
      CHECK(errors == no_errors(2));
      for (const at::Tensor& output : outputs)
        for (int rank = 0; rank < 2; ++rank)
          CHECK(
              at::equal(output[rank].view(at::kByte), numbers(4, rank).to(dtype).view(at::kByte)));
    }
}

TEST_CASE("the input of an all-gather may be the rank's own piece of the output",
          "[comm][collectives]") {
  for (const Backend& backend : value_backends()) {
    CAPTURE(backend.name);
    std::vector<at::Tensor> outputs(3);
    const auto errors = backend.run(3, [&](Communicator& world) {
      at::Tensor& output = outputs[world.rank()];
      output = at::zeros({6});
      at::Tensor own = output.narrow(0, 2 * world.rank(), 2);
      own.copy_(numbers(2, world.rank()));
      all_gather(world, output, own);
    });
    CHECK(errors == no_errors(3));
    const at::Tensor expected = at::tensor({0, 1, 100, 101, 200, 201}, at::kFloat);
    for (const at::Tensor& output : outputs) CHECK(at::equal(output, expected));
  }
}

TEST_CASE("a reduce-scatter gives rank r the sum of everyone's r-th piece", "[comm][collectives]") {
  for (const Backend& backend : value_backends())
    for (int size = 1; size <= 5; ++size)
      for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kLong}) {
        CAPTURE(backend.name, size, dtype);
        std::vector<at::Tensor> outputs(size);
        const auto errors = backend.run(size, [&](Communicator& world) {
          outputs[world.rank()] = at::zeros({2}).to(dtype);
          // Every rank's r-th piece is (r, r + 10), times one more than its own rank.
          const at::Tensor pieces =
              at::arange(size).view({-1, 1}) + at::tensor({0, 10}).view({1, 2});
          reduce_scatter(world, outputs[world.rank()],
                         (pieces * (world.rank() + 1)).to(dtype).contiguous());
        });
        CHECK(errors == no_errors(size));
        const int weight = size * (size + 1) / 2;
        for (int rank = 0; rank < size; ++rank)
          CHECK(at::equal(outputs[rank],
                          at::tensor({rank * weight, (rank + 10) * weight}).to(dtype)));
      }
}

TEST_CASE("buffers of several megabytes arrive whole", "[comm][collectives]") {
  // More elements than one message of the gloo backend holds, and no multiple of it.
  constexpr int64_t kNumel = 1'300'007;
  for (const Backend& backend : value_backends())
    for (const int size : {2, 3}) {
      CAPTURE(backend.name, size);
      std::vector<at::Tensor> gathered(size);
      std::vector<at::Tensor> reduced(size);
      const auto errors = backend.run(size, [&](Communicator& world) {
        const int rank = world.rank();
        gathered[rank] = at::zeros({size, kNumel}, at::kInt);
        reduced[rank] = at::zeros({kNumel}, at::kInt);
        all_gather(world, gathered[rank], numbers(kNumel, rank, at::kInt));
        reduce_scatter(world, reduced[rank], gathered[rank] * (rank + 1));
      });
      CHECK(errors == no_errors(size));
      const int weight = size * (size + 1) / 2;
      for (int rank = 0; rank < size; ++rank) {
        for (int from = 0; from < size; ++from)
          CHECK(at::equal(gathered[rank][from], numbers(kNumel, from, at::kInt)));
        CHECK(at::equal(reduced[rank], numbers(kNumel, rank, at::kInt) * weight));
      }
    }
}

TEST_CASE("a batch of tensors of any length arrives like each of them alone", "[comm][collectives]") {
  const std::vector<int64_t> lengths = {700'001, 3, 1, 262'144};
  // All but threads, which pack unless they are told otherwise.
  for (const Backend& backend : std::span(value_backends()).subspan(1))
    for (const int size : {1, 2, 3}) {
      CAPTURE(backend.name, size);
      std::vector<std::vector<at::Tensor>> gathered(size), reduced(size);
      const auto errors = backend.run(size, [&](Communicator& world) {
        if (!world.launches_batches()) throw std::logic_error("it launches no batches");
        const int rank = world.rank();
        std::vector<at::Tensor> pieces, weighted;
        for (const int64_t length : lengths) {
          pieces.push_back(numbers(length, rank, at::kInt));
          gathered[rank].push_back(at::zeros({size, length}, at::kInt));
          reduced[rank].push_back(at::zeros({length}, at::kInt));
        }
        world.start_all_gather_batch(gathered[rank], pieces, "batch")->wait();
        for (const auto& whole : gathered[rank]) weighted.push_back(whole * (rank + 1));
        world.start_reduce_scatter_batch(reduced[rank], weighted, ReduceOp::kSum, "batch")->wait();
      });
      CHECK(errors == no_errors(size));
      for (int rank = 0; rank < size; ++rank)
        for (size_t i = 0; i < lengths.size(); ++i) {
          for (int from = 0; from < size; ++from)
            CHECK(at::equal(gathered[rank][i][from], numbers(lengths[i], from, at::kInt)));
          CHECK(at::equal(reduced[rank][i],
                          numbers(lengths[i], rank, at::kInt) * (size * (size + 1) / 2)));
        }
    }
}

TEST_CASE("a sum is taken in the order of the ranks", "[comm][collectives]") {
  // In float32, (1e8 + -1e8) + 1 is 1, while any other order of the three loses the 1.
  const std::vector<float> by_rank = {1e8F, -1e8F, 1.0F};
  for (const Backend& backend : value_backends()) {
    CAPTURE(backend.name);
    std::vector<at::Tensor> outputs(3);
    const auto errors = backend.run(3, [&](Communicator& world) {
      outputs[world.rank()] = at::zeros({1});
      reduce_scatter(world, outputs[world.rank()], at::full({3}, by_rank[world.rank()]));
    });
    CHECK(errors == no_errors(3));
    for (const at::Tensor& output : outputs) CHECK(output.item<float>() == 1.0F);
  }
}

TEST_CASE("an all-reduce leaves sum, largest and smallest on every rank", "[comm][collectives]") {
  for (const Backend& backend : value_backends())
    for (int size = 1; size <= 4; ++size) {
      CAPTURE(backend.name, size);
      std::vector<at::Tensor> sums(size), largest(size), smallest(size);
      const auto errors = backend.run(size, [&](Communicator& world) {
        const int rank = world.rank();
        sums[rank] = at::full({2}, rank + 1.0F);
        largest[rank] = sums[rank].clone();
        smallest[rank] = sums[rank].clone();
        all_reduce(world, sums[rank]);
        all_reduce(world, largest[rank], ReduceOp::kMax);
        all_reduce(world, smallest[rank], ReduceOp::kMin);
      });
      CHECK(errors == no_errors(size));
      for (int rank = 0; rank < size; ++rank) {
        CHECK(at::equal(sums[rank], at::full({2}, size * (size + 1) / 2.0F)));
        CHECK(at::equal(largest[rank], at::full({2}, 1.0F * size)));
        CHECK(at::equal(smallest[rank], at::full({2}, 1.0F)));
      }
    }
}

TEST_CASE("a reduce-scatter can take the largest or the smallest", "[comm][collectives]") {
  for (const Backend& backend : value_backends()) {
    CAPTURE(backend.name);
    std::vector<at::Tensor> largest(3), smallest(3);
    const auto errors = backend.run(3, [&](Communicator& world) {
      const int rank = world.rank();
      largest[rank] = at::zeros({1});
      smallest[rank] = at::zeros({1});
      reduce_scatter(world, largest[rank], at::full({3}, rank + 1.0F), ReduceOp::kMax);
      reduce_scatter(world, smallest[rank], at::full({3}, rank + 1.0F), ReduceOp::kMin);
    });
    CHECK(errors == no_errors(3));
    for (int rank = 0; rank < 3; ++rank) {
      CHECK(largest[rank].item<float>() == 3);
      CHECK(smallest[rank].item<float>() == 1);
    }
  }
}

TEST_CASE("a broadcast hands the root's bytes to all, whatever the dtype", "[comm][collectives]") {
  for (const Backend& backend : value_backends())
    for (const auto dtype : {at::kFloat, at::kBool, at::kLong, at::kComplexDouble})
      for (int root = 0; root < 3; ++root) {
        CAPTURE(backend.name, dtype, root);
        std::vector<at::Tensor> tensors(3);
        const auto errors = backend.run(3, [&](Communicator& world) {
          tensors[world.rank()] = numbers(4, world.rank()).to(dtype);
          broadcast(world, tensors[world.rank()], root);
        });
        CHECK(errors == no_errors(3));
        for (const at::Tensor& tensor : tensors)
          CHECK(at::equal(tensor, numbers(4, root).to(dtype)));
      }
}

TEST_CASE("empty tensors pass through every collective", "[comm][collectives]") {
  for (const Backend& backend : value_backends()) {
    CAPTURE(backend.name);
    const auto errors = backend.run(2, [&](Communicator& world) {
      const at::Tensor empty = at::zeros({0});
      all_gather(world, empty, empty);
      reduce_scatter(world, empty, empty);
      all_reduce(world, empty);
      broadcast(world, empty, 1);
    });
    CHECK(errors == no_errors(2));
  }
}

TEST_CASE("collectives may overlap, and be waited for in any order", "[comm][collectives]") {
  for (const Backend& backend : value_backends()) {
    CAPTURE(backend.name);
    std::vector<std::vector<at::Tensor>> outputs(2);
    const auto errors = backend.run(2, [&](Communicator& world) {
      auto& mine = outputs[world.rank()];
      std::vector<std::shared_ptr<Work>> works;
      for (int i = 0; i < 8; ++i) {
        mine.push_back(at::zeros({2, 5}));
        works.push_back(
            world.start_all_gather(mine[i], at::full({5}, 10.0F * i + world.rank()), "many"));
      }
      for (auto work = works.rbegin(); work != works.rend(); ++work) {
        (*work)->wait();
        (*work)->wait();  // free the second time
        if (!(*work)->is_completed()) throw std::logic_error("waited for, yet not completed");
      }
    });
    CHECK(errors == no_errors(2));
    for (const auto& mine : outputs)
      for (int i = 0; i < 8; ++i)
        for (int rank = 0; rank < 2; ++rank)
          CHECK(at::equal(mine[i][rank], at::full({5}, 10.0F * i + rank)));
  }
}

TEST_CASE("a Work may be dropped: the collective still happens, and holds its tensors",
          "[comm][collectives]") {
  for (const Backend& backend : value_backends()) {
    CAPTURE(backend.name);
    std::vector<at::Tensor> kept(2);
    const auto errors = backend.run(2, [&](Communicator& world) {
      kept[world.rank()] = at::zeros({2, 1000});
      // The input is let go of at once, the output is kept by the test.
      world.start_all_gather(kept[world.rank()], at::full({1000}, world.rank() + 1.0F), "dropped");
      world.start_reduce_scatter(at::zeros({1000}), at::ones({2000}), ReduceOp::kSum, "dropped");
      // Later collectives of a rank are done after earlier ones have begun on all.
      all_reduce(world, at::ones({1}));
      all_reduce(world, at::ones({1}));
    });
    CHECK(errors == no_errors(2));
    for (const at::Tensor& output : kept)
      for (int rank = 0; rank < 2; ++rank)
        CHECK(at::equal(output[rank], at::full({1000}, rank + 1.0F)));
  }
}

TEST_CASE("a reduction leaves version counters alone", "[comm][collectives]") {
  for (const Backend& backend : value_backends()) {
    CAPTURE(backend.name);
    std::vector<uint32_t> before(2), after(2);
    const auto errors = backend.run(2, [&](Communicator& world) {
      const at::Tensor output = at::zeros({4});
      const at::Tensor whole = at::ones({8});
      before[world.rank()] = output._version() + whole._version();
      reduce_scatter(world, output, whole);
      all_gather(world, whole, output);
      all_reduce(world, whole);
      after[world.rank()] = output._version() + whole._version();
    });
    CHECK(errors == no_errors(2));
    CHECK(after == before);
  }
}

}  // namespace fsdp::test
