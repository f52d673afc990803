#include <catch2/catch.hpp>

#include "saved_parts.hpp"
#include "support/odd_model.hpp"
#include "temporary_folder.hpp"

namespace fsdp::test {
namespace {

namespace nn = torch::nn;

/// The value that every element of a saved model has.
double saved_value(const Rank& rank, const std::string& path, int64_t width) {
  nn::Linear linear(width, width);
  CheckpointReader(path, {.world = rank.world()}).load({whole_section({{"weight", linear->weight.detach()}, {"bias", linear->bias.detach()}})});
  const auto value = linear->bias[0].item<double>();
  rank.check(linear->weight.eq(value).all().item<bool>() && linear->bias.eq(value).all().item<bool>(), "one save's values");
  return value;
}

void fill(nn::Linear& linear, double value) {
  at::NoGradGuard no_grad;
  for (auto& parameter : linear->parameters()) parameter.fill_(value);
}

TEST_CASE("a save in the background has the values of its beginning", "[checkpoint][checkpoint_saver]") {
  TemporaryFolder folder;
  for (const int64_t max_copy_bytes : {int64_t{1} << 40, int64_t{0}})
    CHECK(on_ranks(2, [&](Rank& rank) {
      nn::Linear linear(300, 300);
      fully_shard(linear, {.mesh = rank.mesh()});
      CheckpointSaver saver({.world = rank.world(), .max_copy_bytes = max_copy_bytes});
      for (int step = 1; step < 4; ++step) {
        fill(linear, step);
        rank.check(saver.start_save(folder / fmt::format("step-{}", step), {linear}), "begun");
        if (max_copy_bytes == 0) rank.check(!saver.is_saving(), "without a copy it is written at once");
        fill(linear, -1);
      }
      saver.wait();
      for (int step = 1; step < 4; ++step)
        rank.check_equal(saved_value(rank, folder / fmt::format("step-{}", step), 300), double(step), "values");
    }));
}

TEST_CASE("a save that began in inference mode leaves no memory that later ones cannot use", "[checkpoint][checkpoint_saver]") {
  TemporaryFolder folder;
  nn::Linear linear(30, 30);
  CheckpointSaver saver;
  {
    const c10::InferenceMode inference;
    saver.start_save(folder / "step-1", {linear});
  }
  saver.start_save(folder / "step-2", {linear});
  saver.wait();
  CHECK(folder.names() == std::set<std::string>{"step-1", "step-2"});
}

TEST_CASE("a relative path is that of the moment of the call", "[checkpoint][checkpoint_saver]") {
  namespace fs = std::filesystem;
  TemporaryFolder folder, elsewhere;
  const auto before = fs::current_path();
  nn::Linear linear(3000, 1000);
  CheckpointSaver saver;
  fs::current_path(folder.path());
  saver.start_save("c", {linear});
  fs::current_path(elsewhere.path());
  saver.wait();
  fs::current_path(before);
  CHECK(folder.names() == std::set<std::string>{"c"});
  CHECK(elsewhere.names().empty());
}

TEST_CASE("while one save is written another is refused by all ranks, if that is asked for", "[checkpoint][checkpoint_saver]") {
  TemporaryFolder folder;
  CHECK(on_ranks(3, [&](Rank& rank) {
    nn::Linear linear(3000, 3000);
    fully_shard(linear, {.mesh = rank.mesh()});
    CheckpointSaver saver({.world = rank.world(), .when_saving = WhenSaving::kRefuse});
    fill(linear, 1);
    rank.check(saver.start_save(folder / "c", {linear}), "the first");
    fill(linear, 2);
    rank.check(!saver.start_save(folder / "c", {linear}), "the second");
    saver.wait();
    rank.check_equal(saved_value(rank, folder / "c", 3000), 1.0, "the first's values");
  }));
}

TEST_CASE("any tensors are saved in the background; what collects them fails on all ranks or on none",
          "[checkpoint][checkpoint_saver]") {
  TemporaryFolder folder;
  CHECK(on_ranks(2, [&](Rank& rank) {
    CheckpointSaver saver({.world = rank.world()});
    auto weight = torch::full({3, 3}, 4.);
    const auto bias = torch::full({3}, 4.);
    rank.check(saver.start_save_parts(folder / "c", [&] { return CheckpointParts{{whole_section({{"weight", weight}, {"bias", bias}})}}; }),
               "begun");
    weight.fill_(5);
    saver.wait();
    rank.check_equal(saved_value(rank, folder / "c", 3), 4.0, "values");
    rank.check_throws<UsageError>(
        [&] {
          saver.start_save_parts(folder / "c", [&]() -> CheckpointParts {
            if (rank.index() == 1) throw UsageError("not these");
            return {{whole_section({{"weight", weight}})}};
          });
        },
        {"rank 1: not these"}, "an error of one rank");
    rank.check_equal(saved_value(rank, folder / "c", 3), 4.0, "the values that were there");
  }));
}

TEST_CASE("a save that failed is told by the next call on every rank, once", "[checkpoint][checkpoint_saver]") {
  TemporaryFolder folder;
  write_bytes(folder / "file", "");
  CHECK(on_ranks(2, [&](Rank& rank) {
    nn::Linear linear(3, 3);
    fully_shard(linear, {.mesh = rank.mesh()});
    CheckpointSaver saver({.world = rank.world()});
    saver.start_save(folder / "file", {linear});
    rank.check_throws<CheckpointError>([&] { saver.start_save(folder / "c", {linear}); }, {"is no folder"}, "the next save");
    rank.check(saver.start_save(folder / "c", {linear}), "then it goes on");
    saver.wait();
    saver.start_save(folder / "file", {linear});
    rank.check_throws<CheckpointError>([&] { saver.wait(); }, {"is no folder"}, "wait");
    saver.wait();
  }));
}

}  // namespace
}  // namespace fsdp::test
