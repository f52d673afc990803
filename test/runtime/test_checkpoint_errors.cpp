#include <catch2/catch.hpp>

#include <ATen/autocast_mode.h>

#include "support/error_of.hpp"
#include "support/models.hpp"

// Activation checkpoints: state that the recomputation must find and leave as it was, writes in
// place, functions that are not deterministic, exceptions.
namespace fsdp::test {
namespace {

at::Tensor input_leaf(at::IntArrayRef sizes, int seed = 0) { return Inputs(0, seed).normal(sizes).requires_grad_(); }

at::Tensor gradient(const at::Tensor& x, const at::Tensor& y) { return torch::autograd::grad({y.sum()}, {x})[0]; }

bool contains(const std::string& text, const std::string& part) {
  INFO(text);
  CHECK(text.find(part) != std::string::npos);
  return true;
}

/// CPU autocast to bfloat16 while it lives.
struct Autocast {
  Autocast() : was_enabled(at::autocast::is_autocast_enabled(at::kCPU)) {
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    at::autocast::increment_nesting();
  }
  ~Autocast() {
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, was_enabled);
  }
  bool was_enabled;
};

}  // namespace

TEST_CASE("autocast in the recomputation is forward's", "[runtime][activation_checkpoint]") {
  auto layer = seeded(1, [] { return torch::nn::Linear(6, 6); });
  auto x = input_leaf({4, 6});
  auto f = [&](const at::Tensor& in) {
    auto h = torch::tanh(layer->forward(in));
    CHECK(h.scalar_type() == at::kBFloat16);
    return layer->forward(h).to(at::kFloat);
  };
  auto run = [&](bool with_checkpoint) {
    auto y = [&] {
      Autocast autocast;
      return with_checkpoint ? activation_checkpoint(f, x) : f(x);
    }();
    return gradient(x, y);
  };
  CHECK(at::equal(run(true), run(false)));
  CHECK_FALSE(at::autocast::is_autocast_enabled(at::kCPU));

  // And the other way round: a backward under autocast of a forward without.
  auto g = [&](const at::Tensor& in) { return torch::tanh(layer->forward(in)); };
  auto y = activation_checkpoint(g, x);
  Autocast autocast;
  auto found = gradient(x, y);
  CHECK(at::autocast::is_autocast_enabled(at::kCPU));
  CHECK(at::allclose(found, gradient(x, g(x).to(at::kFloat)), 0.05, 0.05));
  CHECK(found.scalar_type() == at::kFloat);
}

TEST_CASE("running statistics move once a step", "[runtime][activation_checkpoint]") {
  for (bool by_name : {false, true}) {
    auto make = [] {
      return seeded(2, [] {
        return torch::nn::Sequential(torch::nn::Linear(4, 4), torch::nn::BatchNorm1d(4), torch::nn::Tanh());
      });
    };
    auto plain = make(), model = make();
    for (int step = 0; step < 3; ++step) {
      auto x = input_leaf({6, 4}, step);
      auto expected = gradient(x, plain->forward(x).exp());
      auto f = [&](const at::Tensor& in) { return model->forward(in); };
      auto y = by_name ? activation_checkpoint({.buffers = model->buffers()}, f, x) : activation_checkpoint(model, x);
      CHECK(at::equal(gradient(x, y.exp()), expected));
    }
    for (size_t i = 0; i < plain->buffers().size(); ++i) CHECK(at::equal(model->buffers()[i], plain->buffers()[i]));
  }
}

TEST_CASE("a custom autograd function's tensors are recomputed too", "[runtime][activation_checkpoint]") {
  struct Cube : torch::autograd::Function<Cube> {
    static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x) {
      context->save_for_backward({x});
      return x.pow(3);
    }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                   torch::autograd::variable_list grads) {
      const auto first = context->get_saved_variables()[0], again = context->get_saved_variables()[0];
      return {grads[0] * 3 * first * again};
    }
  };
  auto x = input_leaf({5});
  auto f = [](const at::Tensor& in) { return Cube::apply(in.sin()); };
  CHECK(at::equal(gradient(x, activation_checkpoint(f, x)), gradient(x, f(x))));
}

TEST_CASE("an output may be modified in place", "[runtime][activation_checkpoint]") {
  auto x = input_leaf({5});
  auto f = [](const at::Tensor& in) { return torch::exp(torch::sin(in)); };  // saves its result
  auto y = activation_checkpoint(f, x);
  y.mul_(2).add_(1);
  CHECK(at::equal(gradient(x, y), gradient(x, f(x) * 2 + 1)));
  // A result of an operator in place, saved by it.
  auto g = [](const at::Tensor& in) {
    auto h = in * 2;
    h.tanh_();
    return h.view({5, 1});
  };
  auto z = activation_checkpoint(g, x);
  z.add_(3);
  CHECK(at::equal(gradient(x, z), gradient(x, g(x))));
}

TEST_CASE("a function that modifies its input in place is refused", "[runtime][activation_checkpoint]") {
  auto x = input_leaf({5});
  c10::weak_intrusive_ptr<c10::TensorImpl> alive(x.getIntrusivePtr());
  {
    auto input = x * 2;
    alive = c10::weak_intrusive_ptr<c10::TensorImpl>(input.getIntrusivePtr());
    auto text = error_of<UsageError>([&] {
      activation_checkpoint(
          {.name = "block 3"},
          [](at::Tensor in) {
            return in.view({5, 1}).tanh_().sin();
          },
          input);
    });
    contains(text, "block 3");
    contains(text, "tensor 1 of its inputs in place");
    contains(text, "clone it first");
    contains(error_of<StateError>([&] { input.sum().backward(); }), "ended with an exception");
  }
  CHECK(alive.expired());  // nothing keeps itself alive
  // Modified by the caller before backward: LibTorch's own error.
  auto input = x * 2;
  auto y = activation_checkpoint([](const at::Tensor& in) { return in.sin(); }, input);
  input.add_(1);
  contains(error_of<c10::Error>([&] { y.sum().backward(); }), "modified by an inplace operation");
}

TEST_CASE("a tensor that is modified in place after it was saved is an error as without a checkpoint",
          "[runtime][activation_checkpoint]") {
  auto x = input_leaf({5});
  auto f = [](const at::Tensor& in) {
    auto h = torch::exp(in);
    auto y = h * 3;
    h.add_(1);
    return y * torch::sin(h);
  };
  contains(error_of<c10::Error>([&] { f(x).sum().backward(); }), "modified by an inplace operation");
  contains(error_of<StateError>([&] { activation_checkpoint(f, x).sum().backward(); }),
           "modified in place after it had been saved");
}

TEST_CASE("a parameter that is written between forward and backward is an error", "[runtime][activation_checkpoint]") {
  auto layer = seeded(1, [] { return torch::nn::Linear(6, 6); });
  auto x = input_leaf({4, 6});
  auto y = activation_checkpoint(layer, x);
  {
    torch::NoGradGuard no_grad;
    layer->weight.add_(1);
  }
  auto text = error_of<StateError>([&] { y.sum().backward(); });
  contains(text, "torch::nn::LinearImpl");
  contains(text, "was written between forward and backward");
}

TEST_CASE("a function that does something else the second time is an error that says what",
          "[runtime][activation_checkpoint]") {
  auto x = input_leaf({4, 6});
  int calls = 0;
  auto message = [&](ActivationCheckpointOptions options, auto&& function) {
    calls = 0;
    options.name = "stage 2";
    auto y = activation_checkpoint(options, function, x);
    auto text = error_of<UsageError>([&] { y.sum().backward(); });
    contains(text, "stage 2");
    return text;
  };
  auto first = [&] { return ++calls == 1; };
  contains(message({}, [&](const at::Tensor& in) { return (first() ? in : in.narrow(0, 0, 2)).sin(); }),
           "tensor 1 of 1 that forward saved was Float [4, 6] on cpu, recomputed it is Float [2, 6]");
  contains(message({}, [&](const at::Tensor& in) { return (first() ? in : in.to(at::kDouble)).sin().to(at::kFloat); }),
           "Double [4, 6]");
  contains(message({}, [&](const at::Tensor& in) { return first() ? in.sin().cos() : in.sin(); }),
           "forward saved 2 tensors for backward, its recomputation 1");
  contains(
      message({.early_stop = false}, [&](const at::Tensor& in) { return first() ? in.sin() : in.sin().cos().exp(); }),
      "forward saved 1 tensors for backward, its recomputation 3");
  contains(message({}, [&](const at::Tensor& in) { return first() ? in.sin() : in * 2; }), "its recomputation 0");
}

TEST_CASE("an exception leaves forward or backward, and leaves nothing behind", "[runtime][activation_checkpoint]") {
  auto x = input_leaf({5});
  int fail_at = 1, calls = 0;
  at::Tensor escaped;
  auto f = [&](const at::Tensor& in) {
    escaped = in.sin();
    auto y = torch::dropout(torch::cos(escaped), 0.5, true).exp();
    if (++calls == fail_at) throw std::domain_error("it fails");
    return y.exp();
  };
  auto lock = lock_default_generator();
  CHECK(error_of<std::domain_error>([&] { activation_checkpoint(f, x); }) == "it fails");
  contains(error_of<StateError>([&] { escaped.sum().backward(); }), "its forward ended with an exception");
  // What is saved from now on is no checkpoint's.
  int64_t runs = calls;
  CHECK(at::equal(gradient(x, x.sin()), x.cos()));
  CHECK(calls == runs);

  fail_at = 0;
  torch::manual_seed(9);
  activation_checkpoint(f, x);
  auto next = torch::rand({2});
  torch::manual_seed(9);
  auto y = activation_checkpoint(f, x);
  fail_at = calls + 1;
  CHECK(error_of<std::domain_error>([&] { y.sum().backward({}, /*retain_graph=*/true); }) == "it fails");
  CHECK(at::equal(torch::rand({2}), next));  // the generator is back in place
  y.sum().backward();
  CHECK(x.grad().defined());
}

}  // namespace fsdp::test
