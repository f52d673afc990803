#include <catch2/catch.hpp>

#include <thread>

#include "support/error_of.hpp"
#include "support/counting_allocator.hpp"
#include "support/models.hpp"

// Activation checkpoints of models that are not sharded: what they compute, keep and refuse.
// Every result is compared with the same function's without a checkpoint, bit for bit.
namespace fsdp::test {
namespace {

using torch::nn::Linear;

Linear linear(int64_t in = 5, int64_t out = 5) {
  return seeded(3, [&] { return Linear(in, out); });
}

at::Tensor numbers(at::IntArrayRef sizes, int seed = 0) { return Inputs(0, seed).normal(sizes); }

at::Tensor leaf(at::IntArrayRef sizes, int seed = 0) { return numbers(sizes, seed).requires_grad_(); }

/// Gradients of `loss()` with respect to `leaves`.
template <class Loss>
std::vector<at::Tensor> gradients(const std::vector<at::Tensor>& leaves, Loss&& loss) {
  for (auto& tensor : leaves) tensor.mutable_grad().reset();
  loss().backward();
  std::vector<at::Tensor> result;
  for (auto& tensor : leaves) result.push_back(tensor.grad());
  return result;
}

void check_same(const std::vector<at::Tensor>& actual, const std::vector<at::Tensor>& expected) {
  REQUIRE(actual.size() == expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    CAPTURE(i);
    REQUIRE(actual[i].defined() == expected[i].defined());
    if (expected[i].defined()) CHECK(at::equal(actual[i], expected[i]));
  }
}

/// tanh(linear), counting its runs.
struct Counted {
  std::shared_ptr<int> runs = std::make_shared<int>(0);
  std::shared_ptr<int> ends = std::make_shared<int>(0);
  Linear layer = linear();
  at::Tensor operator()(const at::Tensor& x) {
    ++*runs;
    auto y = torch::tanh(layer->forward(torch::sin(x)));
    auto z = y + 1;  // saves nothing
    ++*ends;
    return z;
  }
};

}  // namespace

TEST_CASE("a checkpoint computes what the function computes, and runs it once more in backward",
          "[runtime][activation_checkpoint]") {
  Counted f;
  auto x = leaf({3, 5});
  const auto plain = gradients({x, f.layer->weight, f.layer->bias}, [&] { return f(x).square().sum(); });
  const auto expected = f(x);
  *f.runs = 0;
  CHECK(at::equal(activation_checkpoint(f, x), expected));
  check_same(gradients({x, f.layer->weight, f.layer->bias}, [&] { return activation_checkpoint(f, x).square().sum(); }), plain);
  CHECK(*f.runs == 3);  // two forwards, one backward
}

TEST_CASE("a module is checkpointed as a holder, a shared_ptr or a reference", "[runtime][activation_checkpoint]") {
  auto layer = linear();
  torch::nn::Sequential chain(layer, torch::nn::Tanh(), linear());
  auto x = leaf({3, 5});
  const auto plain = gradients({x, layer->weight}, [&] { return chain->forward(x).sum(); });
  check_same(gradients({x, layer->weight}, [&] { return activation_checkpoint(chain, x).sum(); }), plain);
  check_same(gradients({x, layer->weight}, [&] { return activation_checkpoint(chain.ptr(), x).sum(); }), plain);
  check_same(gradients({x, layer->weight}, [&] { return activation_checkpoint(*chain, x).sum(); }), plain);
  torch::nn::LinearImpl on_the_stack(5, 5);
  const auto own = gradients({on_the_stack.weight}, [&] { return on_the_stack.forward(x).square().sum(); });
  check_same(gradients({on_the_stack.weight}, [&] { return activation_checkpoint(on_the_stack, x).square().sum(); }), own);

  // The checkpoint keeps what it will run.
  auto loss = [&] {
    torch::nn::Sequential passing(linear(), torch::nn::Tanh());
    return activation_checkpoint(passing, x).sum();
  }();
  loss.backward();
  CHECK(x.grad().defined());
}

TEST_CASE("dropout is the same in the recomputation, and the generator goes on as without",
          "[runtime][activation_checkpoint]") {
  auto layer = linear();
  auto x = leaf({8, 5});
  auto f = [&](const at::Tensor& in) {
    return torch::dropout(torch::tanh(layer->forward(torch::dropout(in, 0.4, true))), 0.3, true);
  };
  auto run = [&](bool with_checkpoint) {
    torch::manual_seed(11);
    auto results = gradients({x, layer->weight}, [&] {
      auto y = with_checkpoint ? activation_checkpoint(f, x) : f(x);
      return (y * torch::rand_like(y)).sum();  // draws between forward and backward
    });
    results.push_back(torch::rand({4}));  // and what comes after
    return results;
  };
  auto lock = lock_default_generator();
  const auto plain = run(false);
  check_same(run(true), plain);
  SECTION("and would not be if the states were not preserved") {
    torch::manual_seed(11);
    const ActivationCheckpointOptions options{.preserve_rng_state = false};
    auto other = gradients({x}, [&] { return activation_checkpoint(options, f, x).sum(); });
    torch::manual_seed(11);
    auto same = gradients({x}, [&] { return activation_checkpoint(f, x).sum(); });
    CHECK_FALSE(at::equal(other[0], same[0]));
  }
}

TEST_CASE("a generator of the function's own is preserved when it is named", "[runtime][activation_checkpoint]") {
  auto x = leaf({50});
  auto run = [&](bool with_checkpoint) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(4);
    auto f = [generator](const at::Tensor& in) {
      return torch::sin(in * torch::empty_like(in).bernoulli_(0.5, generator));
    };
    auto results = gradients({x}, [&] {
      return (with_checkpoint ? activation_checkpoint({.generators = {generator}}, f, x) : f(x)).sum();
    });
    results.push_back(torch::rand({3}, generator));
    return results;
  };
  check_same(run(true), run(false));
}

TEST_CASE("activations are released in forward, and what was recomputed as it is used",
          "[runtime][activation_checkpoint][memory]") {
  install_counting_allocator();
  constexpr int64_t kBytes = 4 * 256 * 64;  // of one activation
  auto x = leaf({256, 64});
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> seen;
  auto deep = [&](at::Tensor h) {
    for (int i = 0; i < 6; ++i) {
      h = torch::sin(h);  // saves its input
      seen.emplace_back(h.storage().getWeakStorageImpl());
    }
    return h;
  };
  x.mutable_grad() = torch::zeros_like(x);
  const int64_t before = live_bytes();
  {
    auto y = activation_checkpoint(deep, x);
    CHECK(live_bytes() - before < kBytes + 16384);  // the output, and a generator's state at most
    for (size_t i = 0; i + 1 < seen.size(); ++i) CHECK(seen[i].expired());
    auto loss = y.sum();
    start_recording();
    loss.backward(/*gradient=*/{}, /*retain_graph=*/true);
    CHECK(peak_bytes() - before > 5 * kBytes);  // they were there again
    CHECK(live_bytes() - before < kBytes + 16384);
    // A part of a backward leaves nothing behind either.
    auto half = activation_checkpoint(
        [&](const at::Tensor& in) { return std::pair(torch::sin(torch::cos(in)), torch::exp(torch::cos(in))); }, x);
    torch::autograd::grad({half.first.sum()}, {x}, {}, /*retain_graph=*/true);
    CHECK(live_bytes() - before < 3 * kBytes + 16384);
    loss.backward();
  }
  seen.clear();
  CHECK(live_bytes() - before < 16384);
}

TEST_CASE("the recomputation ends with the last tensor that backward needs", "[runtime][activation_checkpoint]") {
  Counted f;
  auto x = leaf({3, 5});
  activation_checkpoint(f, x).sum().backward();
  CHECK(*f.runs == 2);
  CHECK(*f.ends == 1);
  activation_checkpoint({.early_stop = false}, f, x).sum().backward();
  CHECK(*f.runs == 4);
  CHECK(*f.ends == 3);

  // A handler of the function's own does not see it, nor is a catch-all an obstacle.
  int handled = 0, caught = 0;
  auto g = [&](const at::Tensor& in) {
    auto y = torch::sin(in);
    try {
      y = torch::exp(y);
      y = y + 1;
    } catch (const std::exception&) {
      ++handled;
    } catch (...) {
      ++caught;
    }
    return y;
  };
  check_same(gradients({x}, [&] { return activation_checkpoint(g, x).sum(); }), gradients({x}, [&] { return g(x).sum(); }));
  CHECK(handled == 0);
  CHECK(caught == 1);
}

TEST_CASE("nested checkpoints compute the same; the deeper, the more often they run",
          "[runtime][activation_checkpoint]") {
  Counted inner, outer;
  auto x = leaf({3, 5});
  auto lock = lock_default_generator();
  auto run = [&](bool nested) {
    torch::manual_seed(2);
    return gradients({x, inner.layer->weight, outer.layer->weight}, [&] {
      auto level2 = [&](const at::Tensor& in) { return torch::dropout(inner(in), 0.5, true); };
      // By value: they run again in backward, when this scope has ended.
      auto level1 = [&, level2](const at::Tensor& in) {
        auto h = torch::exp(in * 0.1);
        h = nested ? activation_checkpoint(level2, torch::cos(h)) : level2(torch::cos(h));
        return outer(torch::dropout(h, 0.5, true));
      };
      auto level0 = [&, level1](const at::Tensor& in) {
        return torch::sigmoid(nested ? activation_checkpoint(level1, in) : level1(in));
      };
      return (nested ? activation_checkpoint(level0, x) : level0(x)).square().sum();
    });
  };
  const auto plain = run(false);
  *inner.runs = *outer.runs = 0;
  check_same(run(true), plain);
  CHECK(*outer.runs >= 3);
  CHECK(*outer.runs <= 4);
  CHECK(*inner.runs >= 3);
  CHECK(*inner.runs <= 4);
}

TEST_CASE("inputs may be anything: tensors in containers are watched, the rest passes through",
          "[runtime][activation_checkpoint]") {
  struct Named {
    double factor;
  };
  auto a = leaf({4}, 1), b = leaf({4}, 2), c = leaf({4}, 3), d = leaf({4}, 4), e = leaf({4}, 5);
  auto mask = torch::tensor({1, 0, 1, 1});
  auto f = [](at::Tensor first, const std::vector<at::Tensor>& list, std::optional<at::Tensor> maybe,
              std::tuple<at::Tensor, int, std::pair<std::string, at::Tensor>> mixed, at::TensorList view,
              at::IntArrayRef sizes, const char* text, const Named& named, std::array<at::Tensor, 1>&& moved,
              std::optional<at::Tensor> none, at::Tensor undefined, bool flag) {
    CHECK(sizes == at::IntArrayRef({2, 2}));
    CHECK(std::string(text) == "text");
    CHECK(std::get<1>(mixed) == 7);
    CHECK(std::get<2>(mixed).first == "name");
    CHECK_FALSE(none.has_value());
    CHECK_FALSE(undefined.defined());
    CHECK(flag);
    auto h = torch::sin(first) * list[0].exp() + maybe->cos() * std::get<0>(mixed) * std::get<2>(mixed).second;
    h = h * view[0].tanh() * named.factor + torch::sigmoid(moved[0]);
    return std::tuple(h.view(sizes), std::vector<at::Tensor>{h * h, first.exp()}, 3);
  };
  auto run = [&](bool with_checkpoint) {
    return gradients({a, b, c, d, e}, [&] {
      std::vector<at::Tensor> viewed{e};
      std::tuple<at::Tensor, int, std::pair<std::string, at::Tensor>> mixed{d, 7, {"name", mask}};
      auto call = [&](auto&&... in) {
        return with_checkpoint ? activation_checkpoint(f, std::forward<decltype(in)>(in)...)
                               : f(std::forward<decltype(in)>(in)...);
      };
      auto [h, list, three] =
          call(a, std::vector<at::Tensor>{b}, std::optional(c), mixed, at::TensorList(viewed), at::IntArrayRef({2, 2}),
               "text", Named{0.5}, std::array<at::Tensor, 1>{a * 2}, std::optional<at::Tensor>(), at::Tensor(), true);
      viewed.clear();
      CHECK(three == 3);
      return h.sum() + list[0].sum() + list[1].sum();
    });
  };
  check_same(run(true), run(false));
}

TEST_CASE("inputs may need no gradient, and none at all", "[runtime][activation_checkpoint]") {
  Counted f;
  auto x = numbers({3, 5});
  auto loss = [&] { return activation_checkpoint(f, x).square().sum(); };
  check_same(gradients({f.layer->weight, f.layer->bias}, loss),
             gradients({f.layer->weight, f.layer->bias}, [&] { return f(x).square().sum(); }));
  f.layer->weight.requires_grad_(false);
  f.layer->bias.requires_grad_(false);
  CHECK_FALSE(loss().requires_grad());
  int runs = 0;
  auto weight = f.layer->weight.clone().requires_grad_();
  auto without_inputs = [&] {
    ++runs;
    return torch::sin(weight).sum();
  };
  check_same(gradients({weight}, [&] { return activation_checkpoint(without_inputs); }), {torch::cos(weight).detach()});
  CHECK(runs == 2);
  activation_checkpoint([&] { weight.square(); });  // returns nothing
}

TEST_CASE("several backwards over one graph recompute each", "[runtime][activation_checkpoint]") {
  Counted f;
  auto x = leaf({3, 5});
  auto y = activation_checkpoint(f, x);
  y.sum().backward({}, /*retain_graph=*/true);
  auto once = x.grad().clone();
  y.sum().backward({}, /*retain_graph=*/true);
  CHECK(at::equal(x.grad(), once * 2));
  CHECK(*f.runs == 3);
  y.square().sum().backward();
  CHECK(*f.runs == 4);
  CHECK(error_of<c10::Error>([&] { y.sum().backward(); }).find("a second time") != std::string::npos);
  // The same function used twice in one graph.
  check_same(gradients({x}, [&] { return activation_checkpoint(f, activation_checkpoint(f, x)).sum(); }),
             gradients({x}, [&] { return f(f(x)).sum(); }));
}

TEST_CASE("higher derivatives and backwards within the function are exact", "[runtime][activation_checkpoint]") {
  auto x = leaf({6});
  auto f = [](const at::Tensor& in) { return torch::sin(in).pow(3); };
  auto penalty = [&](bool with_checkpoint) {
    return gradients({x}, [&] {
      auto y = with_checkpoint ? activation_checkpoint(f, x) : f(x);
      auto slope = torch::autograd::grad({y.sum()}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
      return slope.square().sum() + y.sum();
    });
  };
  check_same(penalty(true), penalty(false));

  for (bool early_stop : {true, false}) {
    CAPTURE(early_stop);
    auto within = [](const at::Tensor& in) {
      auto inner = torch::cos(torch::sin(in));
      auto slope = torch::autograd::grad({inner.sum()}, {in})[0];
      return torch::cos(in) * slope;
    };
    check_same(gradients({x}, [&] { return activation_checkpoint({.early_stop = early_stop}, within, x).sum(); }),
               gradients({x}, [&] { return within(x).sum(); }));
  }
}

TEST_CASE("where autograd records nothing the function just runs", "[runtime][activation_checkpoint]") {
  Counted f;
  auto x = leaf({3, 5});
  {
    at::NoGradGuard no_grad;
    CHECK_FALSE(activation_checkpoint(f, x).requires_grad());
  }
  {
    c10::InferenceMode inference;
    CHECK(activation_checkpoint(f, x).is_inference());
  }
  CHECK(*f.runs == 2);
  at::Tensor inferred;
  {
    c10::InferenceMode inference;
    inferred = torch::ones({3, 5});
  }
  auto add = [&](const at::Tensor& a, const at::Tensor& b) { return (a + b).sin(); };
  check_same(gradients({x}, [&] { return activation_checkpoint(add, x, inferred).sum(); }),
             gradients({x}, [&] { return add(x, inferred).sum(); }));
}

TEST_CASE("backward may run in another thread than forward, and several checkpoints at once",
          "[runtime][activation_checkpoint]") {
  auto x = leaf({5, 5});
  Counted f;
  const auto plain = gradients({x}, [&] { return f(x).sum(); });
  x.mutable_grad().reset();
  auto loss = activation_checkpoint(f, x).sum();
  std::thread([&] { loss.backward(); }).join();
  check_same({x.grad()}, plain);

  std::vector<int> wrong(4);
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i)
    threads.emplace_back([&, i] {
      auto own = leaf({5, 5}, i);
      auto g = [](const at::Tensor& in) { return torch::exp(torch::sin(in)).tanh(); };
      for (int step = 0; step < 50; ++step) {
        auto expected = torch::autograd::grad({g(own).sum()}, {own})[0];
        wrong[i] += !at::equal(torch::autograd::grad({activation_checkpoint(g, own).sum()}, {own})[0], expected);
      }
    });
  for (auto& thread : threads) thread.join();
  CHECK(wrong == std::vector<int>(4));
}

}  // namespace fsdp::test
