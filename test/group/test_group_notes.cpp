#include <catch2/catch.hpp>

#include "support/models.hpp"
#include "support/logged_lines.hpp"

// What a group says in the log when its first step begins. A process says each text once, so every case has names of
// its own.

namespace fsdp::test {
namespace {

namespace nn = torch::nn;
using at::Tensor;

struct Pair : nn::Module {
  Pair(const std::string& name, const Tensor& first, const Tensor& second, bool trains_second = true)
      : a(register_parameter(name + "_a", first)), b(register_parameter(name + "_b", second, trains_second)) {}
  void step() { (a.sum() * b.sum()).backward(); }
  Tensor a, b;
};

/// At another level while it lives.
class ScopedLevel {
 public:
  explicit ScopedLevel(spdlog::level::level_enum level) : before_(log().level()) { log().set_level(level); }
  ~ScopedLevel() { log().set_level(before_); }

 private:
  spdlog::level::level_enum before_;
};

}  // namespace

TEST_CASE("what is frozen after a flat layout was planned is warned of, with both lists and the extra gradient bytes",
          "[group][notes]") {
  const LoggedLines logged;
  on_ranks(2, [](Rank& rank) {
    Pair pair("behind", torch::ones({8, 4}), torch::ones({8, 2}));
    fully_shard(pair, {.mesh = rank.mesh(), .layout = ParamLayout::kFlat});
    pair.step();
    pair.b.set_requires_grad(false);
    for (int step = 0; step < 3; ++step) pair.step();
    rank.check(!pair.parameters()[1].requires_grad(), "frozen");
  });
  CHECK(logged.count("64 bytes are frozen (behind_b), 128 bytes are trainable (behind_a); 64 extra gradient bytes; "
                     "freeze them before fully_shard") == 1);
  CHECK(logged.count("\n") == 1);
}

TEST_CASE("a mixed group that costs no gradient bytes is noted for the curious, once", "[group][notes]") {
  for (const bool is_curious : {false, true}) {
    const ScopedLevel level(is_curious ? spdlog::level::info : spdlog::level::warn);
    const LoggedLines logged;
    on_ranks(2, [](Rank& rank) {
      Pair pair("mixed", torch::ones({8, 4}), torch::ones({8, 2}), /*trains_second=*/false);
      Pair whole("whole", torch::ones({4}), torch::ones({2}));
      for (auto* each : {&pair, &whole}) fully_shard(*each, {.mesh = rank.mesh()});
      for (auto* each : {&pair, &whole})
        for (int step = 0; step < 3; ++step) each->step();
      rank.check(pair.parameters()[0].grad().defined(), "trained");
    });
    CHECK(logged.count("64 bytes are frozen (mixed_b), 128 bytes are trainable (mixed_a); 0 extra gradient bytes") ==
          (is_curious ? 1 : 0));
    CHECK(logged.count("mixes frozen") == (is_curious ? 1 : 0));
  }
}

TEST_CASE("a parameter that was a view of what another tensor still uses is warned of by name when a step begins",
          "[group][notes]") {
  const LoggedLines logged;
  on_ranks(2, [&](Rank& rank) {
    auto whole = torch::ones({6, 4});
    Pair pair("used", whole.narrow(0, 0, 2), whole.narrow(0, 2, 2));
    fully_shard(pair, {.mesh = rank.mesh()});
    pair.step();
    pair.step();
    whole.zero_();
    rank.check_identical(full_tensor(pair.a).detach(), torch::ones({2, 4}), "a copy");
  });
  CHECK(logged.count("used_a, used_b: before fully_shard this was a view of 96 bytes that another tensor still uses") ==
        1);
  CHECK(logged.count("\n") == 1);
}

TEST_CASE("views that share a storage among themselves alone are no concern, in one group or in several",
          "[group][notes]") {
  const LoggedLines logged;
  on_ranks(2, [](Rank& rank) {
    auto whole = torch::ones({8, 4});
    struct Two : nn::Module {
      explicit Two(const Tensor& whole)
          : inner(std::make_shared<Pair>("split", whole.narrow(0, 0, 2), whole.narrow(0, 2, 2))),
            outer(register_parameter("split_c", whole.narrow(0, 4, 4))) {
        register_module("inner", inner);
      }
      std::shared_ptr<Pair> inner;
      Tensor outer;
    } two(whole);
    // A view that autograd has recorded keeps what it is a view of, until it is sharded.
    struct Turned : nn::Module {
      Tensor weight = register_parameter("turned", torch::arange(12.).view({3, 4}).narrow(0, 0, 2).t());
    } turned;
    whole.reset();
    fully_shard(*two.inner, {.mesh = rank.mesh()});
    fully_shard(two, {.mesh = rank.mesh()});
    fully_shard(turned, {.mesh = rank.mesh()});
    (two.inner->a.sum() * two.inner->b.sum() * two.outer.sum()).backward();
    turned.weight.sum().backward();
    rank.check(turned.parameters()[0].grad().defined(), "trained");
  });
  CHECK(logged.text() == "");
}

TEST_CASE("one rank, whose parameters stay views, says nothing of what they share", "[group][notes]") {
  const LoggedLines logged;
  on_ranks(1, [](Rank& rank) {
    auto whole = torch::ones({6, 4});
    Pair pair("shared", whole.narrow(0, 0, 2), whole.narrow(0, 2, 2));
    fully_shard(pair, {.mesh = rank.mesh()});
    pair.step();
    whole.zero_();
    rank.check_identical(pair.parameters()[0].detach(), torch::zeros({2, 4}), "the same memory");
  });
  CHECK(logged.count("this was a view") == 0);
}

}  // namespace fsdp::test
