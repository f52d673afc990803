#include <catch2/catch.hpp>

#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "support/models.hpp"

// A step's gradients are made of what the last step's were made of, once nobody has those any more.

namespace fsdp::test {
namespace {

using at::Tensor;

/// One group of one parameter.
struct OneWeight {
  explicit OneWeight(const Rank& rank)
      : net(seeded(5, [] { return torch::nn::Linear(torch::nn::LinearOptions(3, 4).bias(false)); })) {
    fully_shard(net, {.mesh = rank.mesh()});
    parameter = sharded(net->weight);
  }
  /// The gradient is `value` everywhere.
  void backward(double value) { net->forward(torch::full({1, 3}, value)).sum().backward(); }
  static Tensor rows(double value) { return torch::full({2, 3}, value); }

  torch::nn::Linear net;
  Tensor parameter;
};

TEST_CASE("rows that a user assigns as a gradient may be any tensor that he can make", "[runtime][gradients]") {
  on_ranks(2, [](Rank& rank) {
    OneWeight one(rank);
    const auto of_any_kind = [](int kind) {
      const auto rows = torch::ones({2, 3});
      if (kind == 0) return rows.detach();
      if (kind == 1) return rows.variable_data();  // whose metadata nobody may change
      return torch::ones({3, 2}).t();
    };
    for (int kind = 0; kind < 3; ++kind) {
      one.parameter.mutable_grad() = of_any_kind(kind);
      one.backward(2);
      rank.check_close(one.parameter.grad(), one.rows(3), "the sum");
      one.net->zero_grad();
      one.backward(5);
      rank.check_close(one.parameter.grad(), one.rows(5), "the next one");
      one.net->zero_grad();
    }
  });
}

TEST_CASE("a gradient's storage shows its values as long as somebody has it, and the memory goes with the last who does",
          "[runtime][gradients]") {
  on_ranks(2, [](Rank& rank) {
    for (int way = 0; way < 4; ++way) {
      auto one = std::make_unique<OneWeight>(rank);
      one->backward(2);
      auto gradient = one->parameter.grad();
      const auto memory = to_local(gradient).storage().getWeakStorageImpl();
      auto storage = gradient.storage();
      auto plain = torch::empty({4, 3});
      if (way == 1) plain.set_data(gradient);
      if (way == 2) one.reset();
      if (way == 3) {
        one->net->zero_grad();
        one->backward(3);
        one->parameter.grad();
      }
      gradient.reset();
      if (one && way != 3) one->net->zero_grad();
      const auto read = torch::empty({0}).set_(storage, 0, {4, 3}, {3, 1});
      rank.check_identical(read, torch::full({4, 3}, 2.), fmt::format("way {}: by the storage", way));
      storage = c10::Storage();
      rank.check(way == 1 || memory.expired(), fmt::format("way {}: the memory is gone", way));
      if (way == 1) rank.check_identical(plain * 1, torch::full({4, 3}, 2.), "by a tensor that has the gradient's data");
      plain.reset();
      rank.check(memory.expired(), fmt::format("way {}: at last the memory is gone", way));
    }
  });
}

TEST_CASE("what autograd has saved of a gradient's rows does not count as changed when later gradients are",
          "[runtime][gradients]") {
  on_ranks(2, [](Rank& rank) {
    OneWeight one(rank);
    one.backward(2);
    const auto weight = torch::ones({2, 3}).requires_grad_();
    const auto loss = (weight * to_local(one.parameter.grad()).detach()).sum();
    one.net->zero_grad();
    one.backward(3);
    one.parameter.grad().mul_(2);
    loss.backward();
    rank.check_identical(weight.grad(), one.rows(2), "as it was");
  });
}

TEST_CASE("a weak pointer to a gradient's rows ends with them", "[runtime][gradients]") {
  on_ranks(2, [](Rank& rank) {
    OneWeight one(rank);
    one.backward(2);
    using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
    const WeakTensor rows(to_local(one.parameter.grad()).getIntrusivePtr());
    one.net->zero_grad();
    rank.check(rows.expired(), "nobody has them");
  });
}

TEST_CASE("gradients in other hands stay as they are while later ones are made", "[runtime][gradients]") {
  on_ranks(2, [](Rank& rank) {
    using Take = std::function<Tensor(const Tensor&)>;
    const std::vector<Take> takes = {
        [](const Tensor& gradient) { return to_local(gradient); },
        [](const Tensor& gradient) { return to_local(gradient).detach(); },
        [](const Tensor& gradient) { return to_local(gradient).view(-1); },
        [](const Tensor& gradient) { return gradient; },
        [](const Tensor& gradient) { return gradient.detach(); },
        [](const Tensor& gradient) { return gradient.t(); },
        [](const Tensor& gradient) { return gradient.unsqueeze(2); },
        [](const Tensor& gradient) { return gradient.variable_data(); },
        [](const Tensor& gradient) { return fsdp::DTensor(gradient).redistribute({Shard{0}}); },
    };
    OneWeight one(rank);
    std::vector<std::pair<Tensor, double>> held;
    Tensor average;
    double expected = 1;
    std::vector<std::thread> threads;
    for (int step = 1; step <= 40; ++step) {
      one.backward(step);
      const auto& gradient = one.parameter.grad();
      held.emplace_back(takes[static_cast<size_t>(step) % takes.size()](gradient), step);
      average = step == 1 ? gradient : average * 0.5 + gradient * 0.5;
      if (step > 1) expected = (expected + step) / 2;
      rank.check_close(average, one.rows(expected), fmt::format("step {}: the average", step));
      threads.emplace_back([kept = gradient]() mutable { kept.reset(); });  // whoever is the last to drop it
      if (step % 3 == 0)
        one.parameter.mutable_grad().reset();
      else
        one.net->zero_grad();
      if (step % 7 == 0) held.erase(held.begin(), held.begin() + 3);
      for (const auto& [tensor, value] : held)
        rank.check(to_local(tensor).eq(value).all().item<bool>(), fmt::format("step {}: of step {}", step, value));
    }
    for (auto& thread : threads) thread.join();
  });
}

TEST_CASE("gradients that two parameters swap or share are each one's own", "[runtime][gradients]") {
  on_ranks(2, [](Rank& rank) {
    OneWeight one(rank), other(rank);
    for (int step = 1; step <= 6; ++step) {
      one.backward(step);
      other.backward(10 * step);
      std::swap(one.parameter.mutable_grad(), other.parameter.mutable_grad());
      one.backward(1);
      rank.check_close(one.parameter.grad(), one.rows(10 * step + 1), "one");
      rank.check_close(other.parameter.grad(), one.rows(step), "other");
      if (step % 2 == 1) one.parameter.mutable_grad() = other.parameter.grad();
      one.net->zero_grad();
      if (step % 2 == 1) rank.check_close(other.parameter.grad(), one.rows(step), "other, when one has dropped it");
      other.net->zero_grad(/*set_to_none=*/step % 3 != 0);
      if (step % 3 == 0) rank.check_close(other.parameter.grad(), one.rows(0), "zeros");
      other.net->zero_grad();
    }
  });
}

}  // namespace
}  // namespace fsdp::test
