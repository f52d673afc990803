// What ranks that are threads are told when something goes wrong.
#include <atomic>
#include <catch2/catch.hpp>
#include <future>

#include "fsdp/error.hpp"
#include "fsdp/process_group.hpp"
#include "rank_results.hpp"

namespace fsdp::test {

using Catch::Contains;


TEST_CASE("different operations in one place fail on all ranks, showing both", "[comm][threads]") {
  const auto errors = errors_on_threads(
      3,
      [](Communicator& world) {
        const at::Tensor tensor = at::ones({6});
        if (world.rank() == 2)
          all_reduce(world, tensor, ReduceOp::kSum, "norm");
        else
          all_gather(world, tensor, at::ones({2}), "block");
      },
      beyond_patience());
  for (int rank = 0; rank < 3; ++rank) {
    CHECK_THAT(errors[rank], Contains("the ranks disagree about collective 0"));
    CHECK_THAT(errors[rank], Contains("all_gather of [2 Float] for 'block'"));
    CHECK_THAT(errors[rank], Contains("all_reduce (sum) of [6 Float] for 'norm'"));
    CHECK_THAT(errors[rank], Contains("on rank " + std::to_string(rank) + " of 3"));
  }
}

TEST_CASE("different sizes, dtypes, reductions or roots fail on all ranks", "[comm][threads]") {
  const std::vector<RankMain> bodies = {
      [](Communicator& world) { all_reduce(world, at::ones({2 + world.rank()})); },
      [](Communicator& world) {
        all_reduce(world, at::ones({2}, world.rank() ? at::kFloat : at::kDouble));
      },
      [](Communicator& world) {
        all_reduce(world, at::ones({2}), world.rank() ? ReduceOp::kMax : ReduceOp::kSum);
      },
      [](Communicator& world) { broadcast(world, at::ones({2}), world.rank()); },
  };
  for (const RankMain& body : bodies)
    for (const std::string& error : errors_on_threads(2, body, beyond_patience()))
      CHECK_THAT(error, Contains("the ranks disagree about collective 0"));
}

TEST_CASE("different subjects alone are no mistake", "[comm][threads]") {
  const auto errors = errors_on_threads(
      2,
      [](Communicator& world) {
        all_reduce(world, at::ones({1}), ReduceOp::kSum, world.rank() ? "a" : "b");
      },
      beyond_patience());
  CHECK(errors == no_errors(2));
}

TEST_CASE("what one rank throws is thrown by run_ranks, and the others do not hang",
          "[comm][threads]") {
  std::vector<std::string> seen(3);
  const auto begin = std::chrono::steady_clock::now();
  const auto rank_main = [&](const std::shared_ptr<Communicator>& world) {
    const auto group = world->split(std::vector<int>{0, 1, 2}, "group");
    all_reduce(*world, at::ones({1}));  // all have split
    if (world->rank() == 1) throw std::runtime_error("out of cheese");
    try {
      all_reduce(*group, at::ones({1}), ReduceOp::kSum, "block");
    } catch (const CommError& error) {
      seen[world->rank()] = error.what();
      throw;
    }
  };
  CHECK_THROWS_WITH(run_ranks(3, rank_main), "out of cheese");
  CHECK(std::chrono::steady_clock::now() - begin < patience());
  for (const int rank : {0, 2}) {
    CHECK_THAT(seen[rank], Contains("all_reduce of 'block' (4 bytes) in group 'group[0,1,2]'"));
    CHECK_THAT(seen[rank], Contains("rank 1 ended with: out of cheese"));
  }
}

TEST_CASE("a rank that ends early is named at once", "[comm][threads]") {
  const auto begin = std::chrono::steady_clock::now();
  const auto errors = errors_on_threads(
      3,
      [](Communicator& world) {
        if (world.rank() != 2) all_reduce(world, at::ones({1}), ReduceOp::kSum, "block");
      },
      beyond_patience());
  CHECK(std::chrono::steady_clock::now() - begin < patience());
  for (const int rank : {0, 1}) CHECK_THAT(errors[rank], Contains("rank 2 (which has ended)"));
  CHECK(errors[2].empty());
}

TEST_CASE("a timeout names operation, subject, group, rank and who is missing", "[comm][threads]") {
  std::promise<void> failed;
  const auto has_failed = failed.get_future().share();
  FailedOperation about;
  const auto errors = errors_on_threads(
      3,
      [&](Communicator& world) {
        if (world.rank() != 0) return (void)has_failed.wait_for(patience());
        try {
          all_gather(world, at::ones({6}), at::ones({2}), "blocks.3");
        } catch (const CommError& error) {
          about = error.failed();
          failed.set_value();
          throw;
        }
      },
      std::chrono::milliseconds(100));
  CHECK(about.operation == "all_gather");
  CHECK(about.subject == "blocks.3");
  CHECK(about.group == "world");
  CHECK(about.rank == 0);
  CHECK(about.size == 3);
  CHECK_THAT(errors[0], Contains("all_gather of 'blocks.3' (24 bytes) in group 'world' on rank 0 "
                                 "of 3 failed: timed out after 100 ms"));
  CHECK_THAT(errors[0], Contains("waited in vain for ranks 1, 2"));
}

TEST_CASE("after a failure every call of the group fails, and Works that were done stay done",
          "[comm][threads]") {
  std::vector<std::string> first(2);
  std::atomic<bool> is_aborted = false;
  const auto errors = errors_on_threads(
      2,
      [&](Communicator& world) {
        const at::Tensor tensor = at::ones({1});
        const auto done = world.start_all_reduce(tensor, ReduceOp::kSum, "done");
        done->wait();
        const auto pending =
            world.rank() == 0 ? world.start_all_reduce(tensor, ReduceOp::kSum, "pending") : nullptr;
        if (world.rank() == 0) {
          world.abort("enough");
          is_aborted = true;
        }
        while (!is_aborted) std::this_thread::yield();
        done->wait();
        if (pending) {
          for (int i = 0; i < 2; ++i) {
            try {
              pending->wait();
              throw std::logic_error("an aborted collective succeeded");
            } catch (const CommError& error) {
              first[i] = error.what();
            }
          }
          if (!pending->is_completed()) throw std::logic_error("a wait would not block any more");
        }
        all_reduce(world, tensor, ReduceOp::kSum, "later");
      },
      beyond_patience());
  for (const std::string& message : first)
    CHECK_THAT(message,
               Contains("all_reduce of 'pending' (4 bytes) in group 'world' on rank 0 of 2 "
                        "failed: enough"));
  for (const std::string& error : errors)
    CHECK_THAT(error, Contains("'later'") && Contains("enough"));
}

TEST_CASE("aborting one group leaves its siblings alone", "[comm][threads]") {
  std::vector<float> sums(2);
  const auto errors = errors_on_threads(
      2,
      [&](Communicator& world) {
        const auto group = world.split(std::vector<int>{0, 1}, "group");
        group->abort("only this one");
        const at::Tensor sum = at::ones({1});
        all_reduce(world, sum);
        sums[world.rank()] = sum.item<float>();
      },
      beyond_patience());
  CHECK(errors == no_errors(2));
  CHECK(sums == std::vector<float>{2, 2});
}

TEST_CASE("ranks that are threads have no default world", "[comm][threads]") {
  CHECK_THROWS_AS(run_ranks(1, [](const auto&) { default_process_group(); }), StateError);
}

TEST_CASE("run_ranks needs a rank", "[comm][threads]") {
  CHECK_THROWS_AS(run_ranks(0, [](const auto&) {}), UsageError);
}

TEST_CASE("a batch is one launch with the values of its parts", "[comm][threads]") {
  std::vector<at::Tensor> gathered(2), reduced(2);
  const auto errors = errors_on_threads(
      2,
      [&](Communicator& world) {
        const float rank = world.rank();
        const std::vector<at::Tensor> wholes = {at::zeros({4}), at::zeros({2}, at::kLong)};
        const std::vector<at::Tensor> parts = {at::full({2}, rank),
                                               at::full({1}, world.rank(), at::kLong)};
        world.start_all_gather_batch(wholes, parts, "batch")->wait();
        gathered[world.rank()] = at::cat({wholes[0], wholes[1].to(at::kFloat)});
        const std::vector<at::Tensor> sums = {at::zeros({2}), at::zeros({1}, at::kLong)};
        world.start_reduce_scatter_batch(sums, wholes, ReduceOp::kSum, "batch")->wait();
        reduced[world.rank()] = at::cat({sums[0], sums[1].to(at::kFloat)});
      },
      beyond_patience(), /*launches_batches=*/true);
  CHECK(errors == no_errors(2));
  for (int rank = 0; rank < 2; ++rank) {
    CHECK(at::equal(gathered[rank], at::tensor({0, 0, 1, 1, 0, 1}, at::kFloat)));
    CHECK(at::equal(reduced[rank], at::full({3}, 2.0F * rank)));
  }
}

TEST_CASE("a backend without batches says so", "[comm][threads]") {
  const auto errors = errors_on_threads(
      1,
      [](Communicator& world) {
        const std::vector<at::Tensor> one = {at::ones({1})};
        if (world.launches_batches()) throw std::logic_error("it offers batches");
        world.start_all_gather_batch(one, one, "batch");
      },
      beyond_patience());
  CHECK_THAT(errors[0], Contains("launches no batches") && Contains("launches_batches()"));
}

}  // namespace fsdp::test
