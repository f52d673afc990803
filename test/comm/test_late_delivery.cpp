#include <catch2/catch.hpp>

#include <cmath>

#include "comm/debug/late_delivery.hpp"
#include "comm/debug/poison.hpp"
#include "fsdp/process_group.hpp"
#include "fsdp/simulated_network.hpp"

namespace fsdp::test {
namespace {

struct Late {
  explicit Late(std::chrono::microseconds most = std::chrono::microseconds(0))
      : group(with_late_delivery(simulated_network({.world_size = 2}),
                                 {.faults = faults, .max_delay = most, .random = std::mt19937_64(3)})) {}
  std::shared_ptr<FaultLog> faults = std::make_shared<FaultLog>(/*rank=*/0);
  std::shared_ptr<Communicator> group;
};

bool is_poison(const at::Tensor& tensor) { return !first_written_byte(tensor); }

}  // namespace

TEST_CASE("poison is a NaN in every floating-point dtype", "[comm][poison]") {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
    const auto tensor = at::zeros({5}, dtype);
    CHECK(*first_written_byte(tensor) == 0);
    poison(tensor.narrow(0, 1, 3));
    CHECK(tensor.isnan().sum().item<int64_t>() == 3);
    CHECK(is_poison(tensor.narrow(0, 1, 3)));
    CHECK(*first_written_byte(tensor.narrow(0, 1, 4)) == 3 * tensor.element_size());
  }
  CHECK(is_poison(at::zeros({0})));
}

TEST_CASE("a hash tells contents apart, to the last byte", "[comm][poison]") {
  for (const int64_t numel : {1, 3, 31, 32, 33, 100}) {
    const auto tensor = at::zeros({numel}, at::kByte);
    const auto before = content_hash(tensor);
    for (int64_t i = 0; i < numel; ++i) {
      tensor[i] = 1;
      CHECK(content_hash(tensor) != before);
      tensor[i] = 0;
    }
    CHECK(content_hash(tensor) == before);
  }
}

TEST_CASE("only memory that nobody else keeps is poisoned", "[comm][poison]") {
  auto tensor = at::ones({4});
  const auto raw = tensor.const_data_ptr<float>();
  const auto keeper = tensor;
  poison_if_last(tensor);
  CHECK(raw[0] == 1);
  const auto alone = at::ones({4});
  const auto* whole = alone.const_data_ptr<float>();
  poison_if_last(alone);
  for (int i = 0; i < 4; ++i) CHECK(std::isnan(whole[i]));
  const auto view = at::ones({4}).narrow(0, 1, 2);  // autograd keeps what it is a view of
  poison_if_last(view);
  CHECK(view[0].item<float>() == 1);
}

TEST_CASE("results arrive with the wait for them; until then outputs are poison", "[comm][late_delivery]") {
  Late late;
  const auto input = at::ones({2}), whole = at::zeros({4}), piece = at::zeros({2}), sum = at::ones({3});
  const auto gather = late.group->start_all_gather(whole, input, "subject");
  const auto reduce = late.group->start_reduce_scatter(piece, at::ones({4}), ReduceOp::kSum, "subject");
  const auto all = late.group->start_all_reduce(sum, ReduceOp::kSum, "subject");
  for (const auto& output : {whole, piece, sum}) CHECK(is_poison(output));
  gather->wait();
  CHECK(at::equal(whole.narrow(0, 0, 2), input));
  CHECK(is_poison(piece));
  reduce->wait();
  all->wait();
  CHECK_FALSE(piece.isnan().any().item<bool>());
  CHECK_FALSE(sum.isnan().any().item<bool>());
  gather->wait();  // again: free
  CHECK(late.faults->take().empty());
}

TEST_CASE("a gather may send a piece of its own output", "[comm][late_delivery]") {
  Late late;
  const auto whole = at::tensor({1.F, 2.F, 0.F, 0.F});
  late.group->start_all_gather(whole, whole.narrow(0, 0, 2), "subject")->wait();
  CHECK(at::equal(whole.narrow(0, 0, 2), at::tensor({1.F, 2.F})));
  CHECK(late.faults->take().empty());
}

TEST_CASE("a change to what a collective reads or writes is reported with its subject", "[comm][late_delivery]") {
  Late late;
  const auto input = at::ones({2}), whole = at::zeros({4});
  auto work = late.group->start_all_gather(whole, input, "blocks.3");
  input[1] = 5;
  work->wait();
  auto faults = late.faults->take();
  REQUIRE(faults.size() == 1);
  CHECK(faults[0].find("all_gather of 'blocks.3'") != std::string::npos);
  CHECK(faults[0].find("its input was changed") != std::string::npos);

  const auto piece = at::zeros({2});
  work = late.group->start_reduce_scatter(piece, whole, ReduceOp::kSum, "blocks.4");
  piece[0] = 1;
  work->wait();
  faults = late.faults->take();
  REQUIRE(faults.size() == 1);
  CHECK(faults[0].find("reduce_scatter of 'blocks.4'") != std::string::npos);
  CHECK(faults[0].find("its output was written") != std::string::npos);
}

TEST_CASE("late delivery takes time for some collectives, from the seed", "[comm][late_delivery]") {
  // Which of them are not there yet when they have just been started, with delays that no machine is busy for.
  const auto late_ones = [] {
    Late late(std::chrono::hours(1));
    std::vector<int> found;
    for (int i = 0; i < 20; ++i)
      if (!late.group->start_all_reduce(at::ones({2}), ReduceOp::kSum, "subject")->is_completed()) found.push_back(i);
    return found;
  };
  const auto found = late_ones();
  CHECK(found.size() > 3);
  CHECK(found.size() < 17);
  CHECK(late_ones() == found);

  // The same draws of shorter delays, and waits that take them: some milliseconds each.
  Late late(std::chrono::milliseconds(30));
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < 20; ++i) {
    const auto work = late.group->start_all_reduce(at::ones({2}), ReduceOp::kSum, "subject");
    work->wait();
    CHECK(work->is_completed());
  }
  CHECK(std::chrono::steady_clock::now() - begin > found.size() * std::chrono::microseconds(1500));
}

}  // namespace fsdp::test
