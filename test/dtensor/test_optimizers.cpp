#include <catch2/catch.hpp>

#include <torch/nn/utils/clip_grad.h>
#include <torch/nn/utils/convert_parameters.h>

#include "programs.hpp"

namespace fsdp::test {
namespace {

using namespace torch::optim;

/// Four steps, after which the leaves are compared. They communicate nothing.
template <class Optimizer, class Options>
void check_optimizer(const std::string& name, const Options& options) {
  on_worlds([&](Rank& rank, const DeviceMesh& mesh, const std::vector<Placement>& placements) {
    const auto train = [&](Leaves& leaves) {
      Optimizer optimizer(leaves.all(), options);
      for (uint64_t step = 0; step < 4; ++step) {
        leaves.set_gradients(step);
        optimizer.step();
      }
      return leaves.all();
    };
    Leaves plain, spread(mesh, placements);
    const auto wanted = train(plain);
    const auto found = train(spread);
    rank.check_equal(rank.calls(), std::vector<std::string>{}, name + ": communication");
    check_alike(rank, found, wanted, name);
  });
}

/// How many collectives one that all ranks of the placements take part in is made of: one a mesh dimension that cuts.
size_t cutting(const DeviceMesh& mesh, const std::vector<Placement>& placements) {
  size_t count = 0;
  for (size_t m = 0; m < placements.size(); ++m) count += mesh.shape()[m] > 1 && !std::holds_alternative<Replicate>(placements[m]);
  return count;
}

}  // namespace

TEST_CASE("optimizers step DTensors as they step ordinary tensors, and communicate nothing", "[dtensor][optimizer]") {
  check_optimizer<SGD>("SGD", SGDOptions(0.1).momentum(0.9).nesterov(true).weight_decay(0.1));
  check_optimizer<Adam>("Adam", AdamOptions(0.1).amsgrad(true).weight_decay(0.1));
  check_optimizer<AdamW>("AdamW", AdamWOptions(0.1));
  check_optimizer<Adagrad>("Adagrad", AdagradOptions(0.1).weight_decay(0.1));
  check_optimizer<RMSprop>("RMSprop", RMSpropOptions(0.1).centered(true).momentum(0.9));
}

TEST_CASE("LBFGS finds on DTensors what it finds on ordinary tensors", "[dtensor][optimizer]") {
  const auto minimise = [](LBFGSOptions options) {
    return [options](Leaves& leaves) {
      LBFGS optimizer(leaves.all(), options);
      Tensors results;
      for (int i = 0; i < 2; ++i)
        results.push_back(optimizer.step([&] {
          optimizer.zero_grad();
          auto loss = leaves.loss();
          loss.backward();
          return loss;
        }));
      results.insert(results.end(), leaves.all().begin(), leaves.all().end());
      return results;
    };
  };
  check_program("LBFGS", minimise(LBFGSOptions(0.01).max_iter(3)));
  check_program("LBFGS with a line search", minimise(LBFGSOptions(0.1).max_iter(3).line_search_fn("strong_wolfe")));
}

TEST_CASE("clip_grad_norm_ of DTensors communicates once", "[dtensor][clip]") {
  for (const double p : {1.0, 2.0, std::numeric_limits<double>::infinity()})
    on_worlds([&](Rank& rank, const DeviceMesh& mesh, const std::vector<Placement>& placements) {
      const auto clip = [&](Leaves& leaves) {
        leaves.set_gradients(0);
        Tensors results{torch::tensor(torch::nn::utils::clip_grad_norm_(leaves.all(), 0.5, p))};
        for (const auto& gradient : leaves.gradients()) results.push_back(gradient);
        return results;
      };
      Leaves plain, spread(mesh, placements);
      const auto wanted = clip(plain);
      const auto found = clip(spread);
      rank.check_equal(rank.calls().size(), cutting(mesh, placements), "collectives");
      check_alike(rank, found, wanted, fmt::format("clipped by norm {}", p));
    });
}

TEST_CASE("gradients of DTensors are clipped by value and by hand", "[dtensor][clip]") {
  check_program("clip_grad_value_", [](Leaves& leaves) {
    leaves.set_gradients(0);
    torch::nn::utils::clip_grad_value_(leaves.all(), 0.3);
    return leaves.gradients();
  });
  check_program("by hand", [](Leaves& leaves) {
    leaves.set_gradients(0);
    double sum = 0;
    for (const auto& gradient : leaves.gradients()) sum += gradient.pow(2).sum().item<double>();
    for (auto& gradient : leaves.gradients()) gradient.mul_(0.1 / std::sqrt(sum));
    return leaves.gradients();
  });
}

TEST_CASE("parameters become a vector and back", "[dtensor][optimizer]") {
  check_program("parameters_to_vector", [](Leaves& leaves) { return Tensors{torch::nn::utils::parameters_to_vector(leaves.all())}; });
  check_program("vector_to_parameters", [](Leaves& leaves) {
    leaves.set_gradients(0);
    const torch::NoGradGuard no_grad;
    const auto step = torch::nn::utils::parameters_to_vector(leaves.gradients());
    torch::nn::utils::vector_to_parameters(torch::nn::utils::parameters_to_vector(leaves.all()) - 0.1 * step, leaves.all());
    return leaves.all();
  });
}

TEST_CASE("a moving average follows DTensors in DTensors and in ordinary tensors", "[dtensor][optimizer]") {
  check_program("averages", [](Leaves& leaves) {
    leaves.set_gradients(0);
    const torch::NoGradGuard no_grad;
    Tensors averages;
    for (auto& leaf : leaves.all()) {
      auto average = leaf.detach().clone(), ordinary = torch::ones(leaf.sizes());
      leaf.add_(leaf.grad());
      averages.push_back(average.mul_(0.9).add_(leaf, 0.1).lerp_(leaf, 0.3));
      averages.push_back(ordinary.mul_(0.9).add_(leaf, 0.1));
    }
    return averages;
  });
}

TEST_CASE("foreach and fused operators run on lists of DTensors", "[dtensor][optimizer]") {
  check_program("lists", [](Leaves& leaves) {
    leaves.set_gradients(0);
    const torch::NoGradGuard no_grad;
    auto gradients = leaves.gradients(), parameters = leaves.all();
    Tensors squares, averages, steps;
    for (const auto& leaf : parameters) {
      squares.push_back(torch::zeros_like(leaf));
      averages.push_back(torch::zeros_like(leaf));
      steps.push_back(torch::ones({}));
    }
    at::_foreach_mul_(gradients, 0.5);
    at::_foreach_addcmul_(squares, gradients, gradients, 0.1);
    at::_foreach_lerp_(averages, squares, 0.5);
    auto roots = at::_foreach_sqrt(squares);
    at::_foreach_add_(roots, 1e-3);
    at::_foreach_addcdiv_(parameters, gradients, roots, -0.1);
    at::_fused_adamw_(parameters, gradients, averages, squares, {}, steps, 0.1, 0.9, 0.99, 0.01, 1e-8, false, false);
    Tensors results = parameters;
    results.insert(results.end(), averages.begin(), averages.end());
    results.push_back(torch::stack(at::_foreach_norm(gradients)));
    return results;
  });
}

}  // namespace fsdp::test
