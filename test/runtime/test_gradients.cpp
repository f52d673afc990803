#include <catch2/catch.hpp>

#include "support/models.hpp"

// Where gradients are and what hooks see.

namespace fsdp::test {
namespace {

using at::Tensor;

/// What Python calls register_post_accumulate_grad_hook.
class PostAccumulate final : public torch::autograd::PostAccumulateGradHook {
 public:
  explicit PostAccumulate(std::function<void(const Tensor&)> hook) : hook_(std::move(hook)) {}
  void operator()(const Tensor& parameter) override { hook_(parameter); }

 private:
  std::function<void(const Tensor&)> hook_;
};

TEST_CASE("a parameter and what its module's member holds have one gradient, a DTensor; grad_dtensor_of gives it",
          "[runtime][gradients]") {
  on_ranks(3, [](Rank& rank) {
    auto plain = plain_chain(2, 5);
    ShardedChain chain(rank.mesh(), 2, 5);
    auto expected = averaged_gradients(plain, 3);
    chain.loss(rank.index(), 0).backward();
    auto parameters = unique_parameters(*chain.model);
    for (size_t i = 0; i < parameters.size(); ++i) {
      auto& [name, parameter] = parameters[i];
      const auto gradient = parameter.grad();
      rank.check(is_dtensor(gradient), name + ": a DTensor");
      rank.check(fsdp::unsharded(parameter).grad().is_same(gradient), name + ": the same on the unsharded parameter");
      rank.check_equal(gradient.sizes().vec(), expected[i].second.sizes().vec(), name + ": the whole's sizes");
      rank.check_close(full_tensor(gradient), expected[i].second, name + " gathered");
      rank.check_close(gradient.norm(), expected[i].second.norm(), name + ": its norm");
      auto whole = grad_dtensor_of(parameter);
      rank.check(whole.to_local().data_ptr() == to_local(gradient).data_ptr(), name + ": shares memory");
      rank.check_close(whole.full_tensor(), expected[i].second, name);
      rank.check_close(grad_dtensor_of(fsdp::unsharded(parameter)).full_tensor(), expected[i].second, name + " by unsharded parameter");
    }
  });
}

TEST_CASE("a gradient's memory goes when either side is reset, whoever was asked before", "[runtime][gradients]") {
  on_ranks(2, [](Rank& rank) {
    torch::nn::Linear net(torch::nn::LinearOptions(3, 4).bias(false));  // alone in its group, whose gradients share memory
    fully_shard(net, {.mesh = rank.mesh()});
    auto& member = net->weight;
    const auto parameter = sharded(member);
    for (int way = 0; way < 4; ++way) {
      const auto what = fmt::format("way {}", way);
      for (int pass = 1; pass <= 2; ++pass) {  // the second is added to what the user has seen
        net->forward(torch::ones({1, 3})).sum().backward();
        rank.check_close(parameter.grad(), torch::full({2, 3}, pass, at::kFloat), what);
      }
      const auto memory = to_local(parameter.grad()).storage().getWeakStorageImpl();
      if (way == 0) member.mutable_grad().reset();
      if (way == 1) parameter.mutable_grad().reset();
      if (way == 2) net->zero_grad(/*set_to_none=*/true);
      if (way == 3) parameter.mutable_grad() = torch::zeros_like(parameter);
      rank.check(memory.expired(), what + ": the memory is gone");
      rank.check(member.grad().defined() == (way == 3) && parameter.grad().defined() == (way == 3), what + ": on both sides");
      net->zero_grad(/*set_to_none=*/true);
    }
  });
}

TEST_CASE("a gradient that is replaced in place of a dropped one is taken over, even at its address", "[runtime][gradients]") {
  on_ranks(2, [](Rank& rank) {
    ShardedChain chain(rank.mesh());
    const auto parameter = sharded(chain.model->layers[0]->weight);
    for (int time = 1; time <= 8; ++time) {
      auto& gradient = parameter.mutable_grad();
      gradient.reset();
      gradient = torch::full({6, 6}, time, at::kFloat);
      rank.check_close(full_grad(parameter), torch::full({6, 6}, time, at::kFloat), fmt::format("time {}", time));
    }
  });
}

TEST_CASE("a gradient hook may read the gradient that is added to", "[runtime][gradients]") {
  on_ranks(2, [](Rank& rank) {
    auto plain = plain_chain();
    ShardedChain chain(rank.mesh());
    const auto parameter = sharded(chain.model->layers[0]->weight);
    int had = 0;
    parameter.register_hook([&](const Tensor& gradient) {
      had += parameter.grad().defined();
      return gradient;
    });
    const auto expected = averaged_gradients(plain, 2);
    for (int pass = 1; pass <= 3; ++pass) {
      chain.loss(rank.index(), 0).backward();
      check_gradients(rank, *chain.model, expected, fmt::format("pass {}", pass), pass);
    }
    rank.check_equal(had, 2, "passes that began with a gradient");
  });
}

TEST_CASE("zero_grad of the module and of the optimizer clear them, to none or to zero", "[runtime][gradients]") {
  on_ranks(2, [](Rank& rank) {
    auto plain = plain_chain();
    ShardedChain chain(rank.mesh());
    torch::optim::SGD sgd(chain.model->parameters(), 0.0);
    auto expected = averaged_gradients(plain, 2);
    for (int way = 0; way < 4; ++way) {
      if (way == 0) chain.model->zero_grad(true);
      if (way == 1) chain.model->zero_grad(false);
      if (way == 2) sgd.zero_grad(true);
      if (way == 3) sgd.zero_grad(false);
      chain.loss(rank.index(), 0).backward();
      check_gradients(rank, *chain.model, expected, fmt::format("way {}", way));
    }
    chain.loss(rank.index(), 0).backward();
    check_gradients(rank, *chain.model, expected, "without zeroing they add up", 2);
  });
}

TEST_CASE("the gradient tensor is accumulated in place, so that a reference to it stays good", "[runtime][gradients]") {
  for (const int ranks : {1, 2})
    on_ranks(ranks, [](Rank& rank) {
      auto plain = plain_chain();
      ShardedChain chain(rank.mesh());
      for (int step = 0; step < 3; ++step) {
        const auto kept = sharded(chain.model->head->weight).grad();
        chain.loss(rank.index(), step).backward();
        const auto now = sharded(chain.model->head->weight).grad();
        std::vector<int> steps;
        for (int i = 0; i <= step; ++i) steps.push_back(i);
        const auto expected = rows_of(summed_gradients(plain, rank.size(), steps)[6].second, rank.index(), rank.size());
        rank.check_close(now, expected, fmt::format("step {}: the sum", step));
        if (step == 0) continue;
        rank.check(now.is_same(kept), fmt::format("step {}: another tensor", step));
        rank.check_close(kept, expected, fmt::format("step {}: by the reference", step));
      }
    });
}

TEST_CASE("a gradient that was taken away is not written by the next backward", "[runtime][gradients]") {
  on_ranks(2, [](Rank& rank) {
    auto plain = plain_chain();
    ShardedChain chain(rank.mesh());
    chain.loss(rank.index(), 0).backward();
    auto kept = sharded(chain.model->head->weight).grad();
    auto expected = averaged_gradients(plain, 2);
    rank.check_close(kept, rows_of(expected[6].second, rank.index(), 2), "at first");
    auto before = kept.clone();
    chain.model->zero_grad();
    chain.loss(rank.index(), 3).backward();
    rank.check_close(kept, before, "a gradient taken away is not overwritten by the next step");
  });
}

TEST_CASE("a tensor hook on a member sees and may change this rank's full gradient", "[runtime][gradients]") {
  on_ranks(2, [](Rank& rank) {
    for (bool before : {true, false}) {
      auto plain = plain_chain(1);
      auto model = plain_chain(1);
      std::vector<int64_t> seen;
      auto hook = [&](Tensor gradient) {
        seen = gradient.sizes().vec();
        return gradient * 2;
      };
      if (before) model->layers[0]->weight.register_hook(hook);
      fully_shard(model, {.mesh = rank.mesh()});
      if (!before) model->layers[0]->weight.register_hook(hook);
      Inputs inputs(rank.index(), 0);
      model->forward(inputs.normal({4, 6})).square().mean().backward();
      rank.check_equal(seen, std::vector<int64_t>{6, 6}, "full shape");
      auto expected = averaged_gradients(plain, 2);
      rank.check_close(sharded(model->layers[0]->weight).grad(), rows_of(expected[0].second * 2, rank.index(), 2),
                       before ? "registered before" : "registered after");
    }
  });
}

TEST_CASE("a hook on a sharded parameter reads parameters as any hook of a backward does", "[runtime][gradients]") {
  for (const int ranks : {1, 2, 3})
    CHECK(on_ranks(ranks, [](Rank& rank) {
      auto plain = plain_chain();
      ShardedChain chain(rank.mesh());
      // Of its own group, of one that is long released, of one that is in use.
      const auto scale = [](Chain& model) {
        return 1 + model->layers[0]->weight.detach().abs().sum() + model->layers[2]->weight.abs().max() +
               model->head->bias.detach().abs().sum();
      };
      std::vector<at::Tensor> hooked{sharded(chain.model->layers[0]->weight), sharded(chain.model->layers[2]->bias),
                                     sharded(chain.model->head->weight)};
      bool records = false;
      for (auto& parameter : hooked)
        parameter.register_hook([&](const Tensor& gradient) {
          const auto factor = scale(chain.model);
          records |= factor.requires_grad();
          return gradient * factor;
        });
      for (int step = 0; step < 3; ++step) {
        auto expected = averaged_gradients(plain, rank.size(), step);
        const auto factor = scale(plain).item<double>();
        for (auto& [name, gradient] : expected)
          if (name == "layer0.weight" || name == "layer2.bias" || name == "head.weight") gradient = gradient * factor;
        chain.model->zero_grad();
        rank.log().clear();
        chain.loss(rank.index(), step).backward();
        check_gradients(rank, *chain.model, expected, fmt::format("step {}", step));
        rank.check(!records, "as in the plain model's hooks nothing is recorded");
        rank.check(rank.size() == 1 || (!chain.layers[0].is_unsharded() && !chain.layers[2].is_unsharded()), "released");
      }
      rank.check(chain.root[0].report().backward_order == std::vector<std::string>({"root", "layer2", "layer1"}) ||
                     rank.size() == 1,
                 fmt::format("what hooks read is no part of the order: {}", chain.root[0].report().backward_order));
    }));
}

TEST_CASE("what a hook on a sharded parameter writes counts: the next forward has it", "[runtime][gradients]") {
  for (const int ranks : {1, 2})
    for (const bool after_accumulation : {false, true})
      CHECK(on_ranks(ranks, [after_accumulation](Rank& rank) {
        auto plain = plain_chain();
        ShardedChain chain(rank.mesh(), 3, 6, false);
        chain.root[0].set_reshard_after_backward(false);
        // An optimizer in backward: no step of the program's writes the parameters.
        const auto descend = [](const Tensor& parameter, const Tensor& gradient) { parameter.detach().add_(gradient, -0.5); };
        for (auto& parameter : chain.model->parameters()) {
          if (after_accumulation)
            torch::autograd::impl::set_post_acc_grad_hooks(parameter, std::make_unique<PostAccumulate>([&](const Tensor& self) {
              descend(self, self.grad());
            }));
          else
            parameter.register_hook([&descend, parameter](const Tensor& gradient) { descend(parameter, gradient); });
        }
        for (int step = 0; step < 3; ++step) {
          const auto expected = averaged_gradients(plain, rank.size(), step);
          chain.model->zero_grad();
          const auto loss = chain.loss(rank.index(), step);
          Inputs inputs(rank.index(), step);
          rank.check_close(loss.detach(), plain->forward(inputs.normal({4, 6})).square().mean().detach(),
                           fmt::format("loss of step {}", step));
          loss.backward();
          for (const auto& [name, gradient] : expected) descend(plain->named_parameters()[name], gradient);
        }
      }));
}

TEST_CASE("a parameter that is a view gets its gradient through views that were taken before its gather",
          "[runtime][gradients]") {
  // Such as one that was made non-contiguous: autograd goes on regarding it as a view of what it was made of.
  struct Transposed : torch::nn::Module {
    Transposed() { weight = register_parameter("weight", torch::arange(12.).view({3, 4}).t()); }
    Tensor forward(const Tensor& x) {
      const auto rows = weight.t();  // gathers nothing; the optimizer's write is noticed only after it
      return torch::mm(x, rows);
    }
    Tensor weight;
  };
  for (const int ranks : {1, 2, 3})
    on_ranks(ranks, [](Rank& rank) {
      auto model = std::make_shared<Transposed>();
      int hooked = 0;
      model->weight.register_hook([&](const Tensor&) { ++hooked; });
      fully_shard(*model, {.mesh = rank.mesh()});
      const auto weight = model->parameters()[0];
      rank.check(!model->weight.is_view(), "the unsharded parameter is a view of nothing");
      torch::optim::SGD sgd({weight}, 0.1);
      for (int step = 0; step < 3; ++step) {
        sgd.zero_grad();
        model->forward(torch::ones({2, 3})).sum().backward();
        rank.check(weight.grad().defined() && weight.grad().eq(2).all().item<bool>(), fmt::format("step {}", step));
        sgd.step();
      }
      rank.check_equal(hooked, 3, "a hook of before fully_shard");
    });
}

TEST_CASE("uneven and short shards hold no padding", "[runtime][gradients]") {
  on_ranks(4, [](Rank& rank) {
    torch::nn::Linear net(3, 5);  // rows 2, 2, 1, 0
    fully_shard(net, {.mesh = rank.mesh()});
    net->forward(torch::ones({1, 3})).sum().backward();
    int64_t rows[] = {2, 2, 1, 0};
    rank.check_equal(to_local(sharded(net->weight)).sizes().vec(), std::vector<int64_t>{rows[rank.index()], 3}, "weight");
    rank.check_equal(to_local(net->weight.grad()).sizes().vec(), std::vector<int64_t>{rows[rank.index()], 3}, "gradient");
    rank.check_equal(net->weight.grad().numel(), int64_t{15}, "the whole gradient's numel");
    rank.check_close(grad_dtensor_of(net->weight).full_tensor(), torch::ones({5, 3}), "the whole");
  });
}

TEST_CASE("a sparse embedding gradient is reduced, as a dense one", "[runtime][gradients]") {
  on_ranks(2, [](Rank& rank) {
    torch::nn::Embedding words(torch::nn::EmbeddingOptions(4, 2).sparse(true));
    fully_shard(words, {.mesh = rank.mesh()});
    auto indices = torch::tensor({int64_t{rank.index()}, int64_t{2}});
    words->forward(indices).sum().backward();
    auto expected = torch::tensor({0.5, 0.5, 1.0, 0.0}).to(at::kFloat).view({4, 1}).expand({4, 2});
    auto found = sharded(words->weight).grad();
    rank.check(found.defined() && !found.is_sparse(), "dense");
    rank.check_close(found, rows_of(expected, rank.index(), 2), "reduced");
  });
}

TEST_CASE("a complex gradient that autograd leaves conjugated is reduced as what it is", "[runtime][gradients]") {
  for (const bool batches : {false, true})
    on_ranks(2, [](Rank& rank) {
      struct Net : torch::nn::Module {
        at::Tensor z = register_parameter("z", torch::complex(torch::ones({4, 2}), torch::full({4, 2}, 0.5F)));
      };
      Net net, plain;
      fully_shard(net, {.mesh = rank.mesh()});
      const auto x = torch::complex(torch::arange(8.F).view({4, 2}), torch::ones({4, 2}));
      for (auto* each : {&net, &plain}) (each->z.conj() * x).sum().abs().backward();
      rank.check_throws<Error>([&] { torch::view_as_real(net.z.grad()); }, {"view_as_real", "full_tensor"}, "as another dtype");
      rank.check_close(torch::view_as_real(to_local(net.z.grad()).resolve_conj()),
                       torch::view_as_real(rows_of(plain.z.grad().resolve_conj(), rank.index(), 2)), "the gradient");
    }, {.timeout = patience(), .launches_batches = batches});
}

}  // namespace
}  // namespace fsdp::test
