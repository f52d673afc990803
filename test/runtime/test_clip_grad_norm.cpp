#include <catch2/catch.hpp>

#include <limits>

#include "support/models.hpp"

// Clipping by the global norm.

namespace fsdp::test {
namespace {

using at::Tensor;

double plain_norm(const NamedTensors& gradients, double type) {
  std::vector<Tensor> norms;
  for (auto& [name, gradient] : gradients)
    if (gradient.defined()) norms.push_back(at::linalg_vector_norm(gradient.to(at::kDouble), type));
  return at::linalg_vector_norm(torch::stack(norms), type).item<double>();
}

bool near(double a, double b) { return std::abs(a - b) <= 1e-5 * std::abs(b); }

TEST_CASE("clip_grad_norm_ clips by the global norm, every norm type, and returns it on every rank",
          "[runtime][clip_grad_norm]") {
  on_ranks(3, [](Rank& rank) {
    for (double type : {2.0, 1.0, 3.0, std::numeric_limits<double>::infinity()}) {
      auto plain = plain_chain(3, 5);
      ShardedChain chain(rank.mesh(), 3, 5);
      auto expected = averaged_gradients(plain, 3);
      double norm = plain_norm(expected, type);
      chain.loss(rank.index(), 0).backward();
      rank.check(near(get_total_norm(chain.model->parameters(), type), norm), fmt::format("get_total_norm, {}", type));
      double found = clip_grad_norm_(chain.model->parameters(), norm / 2, type);
      rank.check(near(found, norm), fmt::format("norm {}: expected {}, found {}", type, norm, found));
      check_gradients(rank, *chain.model, expected, fmt::format("clipped by norm {}", type), 0.5);
    }
  });
}

TEST_CASE("norm types of 0 and below give what LibTorch's norms give", "[runtime][clip_grad_norm]") {
  on_ranks(3, [](Rank& rank) {
    for (double type : {0.5, 0.0, -1.0, -2.5, -std::numeric_limits<double>::infinity()}) {
      auto plain = plain_chain(3, 5);
      ShardedChain chain(rank.mesh(), 3, 5);
      const double norm = plain_norm(averaged_gradients(plain, 3), type);
      chain.loss(rank.index(), 0).backward();
      const double found = clip_grad_norm_(chain.model->parameters(), 1e9, type);
      rank.check(near(found, norm), fmt::format("norm {}: expected {}, found {}", type, norm, found));
    }
  });
}

TEST_CASE("clip_grad_norm_async_ clips as clip_grad_norm_ does and returns the norm as a tensor", "[runtime][clip_grad_norm]") {
  on_ranks(2, [](Rank& rank) {
    ShardedChain chain(rank.mesh()), other(rank.mesh());
    for (auto* one : {&chain, &other}) one->loss(rank.index(), 0).backward();
    const double norm = get_total_norm(chain.model->parameters());
    const auto found = clip_grad_norm_async_(chain.model->parameters(), norm / 2);
    rank.check(found.scalar_type() == at::kDouble && found.dim() == 0, "float64 without dimensions");
    rank.check(found.item<double>() == clip_grad_norm_(other.model->parameters(), norm / 2), "the norm");
    for (size_t i = 0; i < chain.model->parameters().size(); ++i)
      rank.check_identical(chain.model->parameters()[i].grad(), other.model->parameters()[i].grad(), "gradients");
  });
}

TEST_CASE("gradients below the limit stay, bit for bit", "[runtime][clip_grad_norm]") {
  on_ranks(2, [](Rank& rank) {
    ShardedChain chain(rank.mesh());
    chain.loss(rank.index(), 0).backward();
    std::vector<Tensor> before;
    for (auto& parameter : chain.model->parameters()) before.push_back(parameter.grad().clone());
    rank.log().clear();
    clip_grad_norm_(chain.model->parameters(), 1e6);
    rank.check_equal(rank.calls().size(), size_t{1}, fmt::format("one all-reduce for the mesh: {}", rank.calls()));
    rank.check_equal(rank.subjects_of("all_reduce").size(), size_t{1}, "an all-reduce");
    for (size_t i = 0; i < before.size(); ++i)
      rank.check_identical(chain.model->parameters()[i].grad(), before[i], "unchanged");
  });
}

TEST_CASE("LibTorch's own clipping clips by the global norm, with one collective", "[runtime][clip_grad_norm]") {
  on_ranks(2, [](Rank& rank) {
    auto plain = plain_chain();
    ShardedChain chain(rank.mesh());
    double norm = plain_norm(averaged_gradients(plain, 2), 2);
    const auto expected = averaged_gradients(plain, 2);
    chain.loss(rank.index(), 0).backward();
    rank.log().clear();
    const double found = torch::nn::utils::clip_grad_norm_(chain.model->parameters(), norm / 4);
    rank.check_equal(rank.calls().size(), size_t{1}, fmt::format("collectives: {}", rank.calls()));
    rank.check(near(found, norm), fmt::format("expected {}, found {}", norm, found));
    check_gradients(rank, *chain.model, expected, "clipped", 0.25);
    torch::nn::utils::clip_grad_value_(chain.model->parameters(), norm / 40);
    for (size_t i = 0; i < expected.size(); ++i)
      rank.check_close(full_grad(chain.model->parameters()[i]), (expected[i].second / 4).clamp(-norm / 40, norm / 40),
                       "clipped by value: " + expected[i].first);
    rank.check(near(clip_grad_norm_(chain.model->parameters(), 1e6), torch::nn::utils::clip_grad_norm_(chain.model->parameters(), 1e6)),
               "ours is the same");
  });
}

TEST_CASE("what modules' members hold is clipped as parameters() are", "[runtime][clip_grad_norm]") {
  on_ranks(2, [](Rank& rank) {
    auto plain = plain_chain();
    ShardedChain chain(rank.mesh());
    const auto expected = averaged_gradients(plain, 2);
    chain.loss(rank.index(), 0).backward();
    const auto members = [&] {
      std::vector<Tensor> found;
      for (auto& layer : chain.model->layers) found.insert(found.end(), {layer->weight, layer->bias});
      found.insert(found.end(), {chain.model->head->weight, chain.model->head->bias});
      return found;
    }();
    const double norm = plain_norm(expected, 2);
    rank.log().clear();
    rank.check(near(get_total_norm(members), norm), "the norm");
    rank.check(near(clip_grad_norm_(members, norm / 2), norm), "ours");
    rank.check_equal(rank.calls().size(), size_t{2}, "a collective each");
    check_gradients(rank, *chain.model, expected, "clipped by ours", 0.5);
    rank.check(near(torch::nn::utils::clip_grad_norm_(members, norm / 4), norm / 2), "LibTorch's");
    check_gradients(rank, *chain.model, expected, "clipped by LibTorch's", 0.25);
  });
}

TEST_CASE("a norm that is not finite throws if asked to, and leaves the gradients", "[runtime][clip_grad_norm]") {
  on_ranks(2, [](Rank& rank) {
    ShardedChain chain(rank.mesh());
    chain.loss(rank.index(), 0).backward();
    auto gradient = chain.model->parameters()[0].grad();
    if (rank.index() == 1) to_local(gradient).view({-1})[0] = std::numeric_limits<float>::quiet_NaN();  // one rank only
    auto before = chain.model->parameters()[1].grad().clone();
    rank.check_throws<StateError>([&] { clip_grad_norm_(chain.model->parameters(), 1.0, 2.0, /*error_if_nonfinite=*/true); },
                                  {"norm"}, "on both ranks");
    rank.check_identical(chain.model->parameters()[1].grad(), before, "left as they are");
    rank.check(std::isnan(clip_grad_norm_(chain.model->parameters(), 1.0)), "allowed by default");
  });
}

TEST_CASE("sharded, replicated and plain parameters together give one norm", "[runtime][clip_grad_norm]") {
  on_ranks(4, [](Rank& rank) {
    auto world = rank.mesh(), hybrid = rank.hybrid(2, 2);
    auto plain = plain_chain();
    auto model = plain_chain();
    fully_shard(model->layers[0], {.mesh = world});
    fully_shard(model->layers[1], {.mesh = hybrid});
    fully_shard(model->layers[2], {.mesh = world, .replicate_only = true});
    // the head stays plain: averaged by hand below
    auto expected = averaged_gradients(plain, 4);
    Inputs inputs(rank.index(), 0);
    model->forward(inputs.normal({4, 6})).square().mean().backward();
    auto head = unique_parameters(*model->head);
    for (size_t i = 0; i < head.size(); ++i)
      head[i].second.mutable_grad() = expected[expected.size() - 2 + i].second.clone();
    double norm = plain_norm(expected, 2);
    double found = clip_grad_norm_(model->parameters(), norm / 4);
    rank.check(near(found, norm), fmt::format("expected {}, found {}", norm, found));
    rank.check_close(model->head->bias.grad(), expected.back().second / 4, "the plain one is clipped");
    rank.check_close(grad_dtensor_of(model->layers[1]->weight).full_tensor(), expected[2].second / 4, "the hybrid one");
    rank.check_close(sharded(model->layers[2]->weight).grad(), expected[4].second / 4, "the replicated one");
  });
}

TEST_CASE("parameters without gradients and empty shards count nothing", "[runtime][clip_grad_norm]") {
  on_ranks(4, [](Rank& rank) {
    torch::nn::Linear net(3, 2);  // 2 rows over 4 ranks
    fully_shard(net, {.mesh = rank.mesh()});
    rank.check(get_total_norm(net->parameters()) == 0, "no gradients");
    net->forward(torch::ones({1, 3})).sum().backward();
    rank.check(near(get_total_norm(net->parameters()), std::sqrt(8.0)), "eight ones");
    rank.check(near(get_total_norm(net->parameters(), std::numeric_limits<double>::infinity()), 1), "the largest");
    rank.check(get_total_norm({}) == 0, "no parameters");
  });
}

TEST_CASE("a norm that is not a number makes all gradients so, whichever rank it came from", "[runtime][clip_grad_norm]") {
  for (const double type : {2.0, std::numeric_limits<double>::infinity()})
    for (const int guilty : {0, 1})
      on_ranks(2, [=](Rank& rank) {
        ShardedChain chain(rank.mesh());
        chain.loss(rank.index(), 0).backward();
        auto parameters = chain.model->parameters();
        if (rank.index() == guilty) to_local(parameters[0].grad()).view({-1})[0] = std::numeric_limits<float>::quiet_NaN();
        rank.check_throws<StateError>([&] { clip_grad_norm_(parameters, 1.0, type, /*error_if_nonfinite=*/true); }, {"norm"}, "asked to");
        rank.check(std::isnan(clip_grad_norm_(parameters, 1.0, type)), "the norm");
        rank.check(parameters[1].grad().isnan().all().item<bool>(), "another parameter's gradient");
      });
}

}  // namespace
}  // namespace fsdp::test
