#include <catch2/catch.hpp>

#include "fsdp/error.hpp"
#include "fsdp/process_group.hpp"
#include "rank_results.hpp"

namespace fsdp::test {

TEST_CASE("a world of one rank copies, and nothing where output is input", "[comm][single_rank]") {
  const auto world = single_rank();
  CHECK(world->size() == 1);
  CHECK(world->rank() == 0);
  CHECK(world->backend() == "single");
  const at::Tensor input = at::tensor({1, 2, 3}, at::kFloat);
  const at::Tensor output = at::zeros({3});
  all_gather(*world, output, input);
  CHECK(at::equal(output, input));
  output.zero_();
  reduce_scatter(*world, output, input);
  CHECK(at::equal(output, input));
  all_gather(*world, input, input);
  all_reduce(*world, input);
  broadcast(*world, input, 0);
  CHECK(at::equal(output, input));
}

TEST_CASE("a world of one rank launches batches and splits into itself", "[comm][single_rank]") {
  const auto world = single_rank();
  const std::vector<at::Tensor> inputs = {at::ones({2}), at::ones({1}, at::kLong)};
  const std::vector<at::Tensor> outputs = {at::zeros({2}), at::zeros({1}, at::kLong)};
  world->start_all_gather_batch(outputs, inputs, "batch")->wait();
  for (size_t i = 0; i < inputs.size(); ++i) CHECK(at::equal(outputs[i], inputs[i]));
  const auto group = world->split(std::vector<int>{0}, "group");
  CHECK(group->name() == "group[0]");
  CHECK(group->size() == 1);
}

TEST_CASE("an aborted world of one rank says why", "[comm][single_rank]") {
  const auto world = single_rank();
  world->abort("enough");
  CHECK_THROWS_WITH(world->start_all_reduce(at::ones({1}), ReduceOp::kSum, "norm"),
                    Catch::Contains("all_reduce of 'norm'") && Catch::Contains("enough"));
}

}  // namespace fsdp::test
