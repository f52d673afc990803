#include <catch2/catch.hpp>

#include "fsdp/parameters.hpp"
#include "support/models.hpp"

// torch::nn::init and Tensor::new_* on sharded parameters, which are the whole to them.

namespace fsdp::test {
namespace {

namespace init = torch::nn::init;
using at::Tensor;

enum class Needs { kOwnTurn, kOtherRanks, kOneRank };

/// All functions of torch::nn::init. Ranks that are threads share LibTorch's generator: who draws from it waits for nobody
/// (kOwnTurn), so what draws and gathers by turns is for one rank.
struct Init {
  std::string name;
  std::function<Tensor(Tensor)> fill;
  Needs needs = Needs::kOwnTurn;
};
const std::vector<Init> kInits = {
    {"constant_", [](Tensor t) { return init::constant_(t, 0.5); }},
    {"dirac_", [](Tensor t) { return init::dirac_(t); }, Needs::kOtherRanks},
    {"eye_", [](Tensor t) { return init::eye_(t); }, Needs::kOtherRanks},
    {"normal_", [](Tensor t) { return init::normal_(t, 1, 0.5); }},
    {"ones_", [](Tensor t) { return init::ones_(t); }},
    {"orthogonal_", [](Tensor t) { return init::orthogonal_(t); }},
    {"sparse_", [](Tensor t) { return init::sparse_(t, 0.5); }, Needs::kOneRank},
    {"uniform_", [](Tensor t) { return init::uniform_(t, -1, 2); }},
    {"kaiming_normal_", [](Tensor t) { return init::kaiming_normal_(t); }},
    {"kaiming_uniform_", [](Tensor t) { return init::kaiming_uniform_(t); }},
    {"xavier_normal_", [](Tensor t) { return init::xavier_normal_(t); }},
    {"xavier_uniform_", [](Tensor t) { return init::xavier_uniform_(t); }},
    {"zeros_", [](Tensor t) { return init::zeros_(t); }},
};

/// A vector, a matrix and kernels of convolutions.
struct FourShapesImpl : torch::nn::Module {
  FourShapesImpl() {
    for (const auto& sizes : std::vector<std::vector<int64_t>>{{6}, {6, 4}, {6, 4, 3}, {6, 4, 3, 3}})
      handles.push_back(register_parameter(fmt::format("of{}", sizes.size()), torch::randn(sizes)));
  }
  std::vector<Tensor> handles;
};
TORCH_MODULE(FourShapes);

/// The error, or "" and the values in `tensor`.
std::string filled(const Init& init, Tensor tensor) {
  const auto run = [&]() -> std::string {
    try {
      init.fill(std::move(tensor));
      return "";
    } catch (const c10::Error& error) {
      return error.what_without_backtrace();
    }
  };
  return init.needs == Needs::kOtherRanks ? run() : seeded(7, run);
}

TEST_CASE("every function of torch::nn::init fills a sharded parameter as it fills the whole",
          "[runtime][libtorch_init]") {
  for (const int ranks : {1, 2, 4})
    on_ranks(ranks, [=](Rank& rank) {
      FourShapes model = seeded(5, [] { return FourShapes(); });
      fully_shard(model, {.mesh = rank.mesh()});
      for (auto& item : model->named_parameters()) {
        auto& registered = item.value();
        for (const auto& init : kInits) {
          const bool gathers_what_it_drew = init.name == "orthogonal_" && registered.dim() > 2;
          if ((init.needs == Needs::kOneRank || gathers_what_it_drew) && ranks > 1) continue;
          const auto what = fmt::format("{} of {}", init.name, item.key());
          const auto whole = seeded(8, [&] { return torch::randn(registered.sizes()); });
          const auto error = filled(init, whole);
          rank.check_equal(filled(init, registered), error, what);
          if (error.empty()) rank.check_identical(registered.detach(), rows_of(whole, rank.index(), ranks), what);
        }
      }
    });
}

TEST_CASE("what torch::nn::init writes to a sharded parameter is gathered next", "[runtime][libtorch_init]") {
  on_ranks(2, [](Rank& rank) {
    FourShapes model = seeded(5, [] { return FourShapes(); });
    fully_shard(model, {.mesh = rank.mesh()});
    for (int round : {1, 2}) {
      init::constant_(model->named_parameters()["of2"], rank.index() + round);
      const auto expected = torch::cat({torch::full({3, 4}, round), torch::full({3, 4}, round + 1)}).to(at::kFloat);
      torch::NoGradGuard no_grad;
      rank.check_identical(model->handles[1] + 0, expected, "the unsharded parameter");
    }
  });
}

TEST_CASE("Tensor::new_* of a sharded parameter, of its unsharded parameter and of views make plain tensors of other sizes",
          "[runtime][libtorch_init]") {
  on_ranks(2, [](Rank& rank) {
    FourShapes model = seeded(5, [] { return FourShapes(); });
    fully_shard(model, {.mesh = rank.mesh()});
    const auto registered = model->named_parameters()["of2"];
    const auto& handle = model->handles[1];
    const auto like = torch::ones({3, 4});
    for (const auto& of : {registered, handle, registered.detach(), handle.t(), registered.view({-1}), handle[0]}) {
      const std::vector<std::pair<Tensor, Tensor>> made = {
          {of.new_zeros({2, 3}), like.new_zeros({2, 3})},
          {of.new_ones({2}, at::kDouble), like.new_ones({2}, at::kDouble)},
          {of.new_full({2, 3}, 7), like.new_full({2, 3}, 7)},
          {of.new_empty({2, 3}).fill_(1), like.new_empty({2, 3}).fill_(1)},
          {of.new_empty_strided({2, 3}, {1, 2}).fill_(2), like.new_empty_strided({2, 3}, {1, 2}).fill_(2)},
      };
      for (const auto& [found, expected] : made) {
        rank.check_identical(found, expected, "new_*");
        rank.check(!found.requires_grad() && found.strides() == expected.strides(), "plain");
        rank.check(found.key_set() == expected.key_set(), "of no library's kind");
        rank.check_equal(found.toString(), expected.toString(), "kind");
      }
      rank.check_equal(of.toString(), like.toString(), "kind of the parameter");
    }
    const auto alike = registered.new_ones(registered.sizes());
    rank.check(is_dtensor(alike) && !alike.requires_grad(), "of its own sizes: a DTensor, as gradients need it");
    rank.check_identical(full_tensor(alike), torch::ones({6, 4}), "its values");
  });
}

}  // namespace
}  // namespace fsdp::test
