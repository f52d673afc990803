#include <catch2/catch.hpp>

#include "support/models.hpp"
#include "support/odd_model.hpp"

// Full parameters in scope, and apply on top of it.

namespace fsdp::test {
namespace {

using at::Tensor;

constexpr FullParametersOptions kReadOnly{.writeback = false};

/// Every parameter of `model` is what `plain` has, an ordinary tensor, under its first name.
void check_whole(const Rank& rank, const torch::nn::Module& model, const torch::nn::Module& plain, const std::string& what) {
  auto expected = unique_parameters(plain), found = unique_parameters(model);
  rank.check_equal(found.size(), expected.size(), what + ": number of parameters");
  for (size_t i = 0; i < std::min(found.size(), expected.size()); ++i) {
    auto& [name, parameter] = found[i];
    rank.check_equal(name, expected[i].first, what + ": name");
    rank.check(parameter.scalar_type() == expected[i].second.scalar_type(), what + ": dtype of " + name);
    rank.check(parameter.strides() == expected[i].second.strides(), what + ": strides of " + name);
    rank.check_identical(parameter.detach(), expected[i].second.detach(), what + ": " + name);
    rank.check(parameter.requires_grad() == expected[i].second.requires_grad(), what + ": requires_grad of " + name);
  }
}

std::vector<Tensor> clones(const std::vector<Tensor>& tensors) {
  std::vector<Tensor> copies;
  for (auto& tensor : tensors) copies.push_back(tensor.detach().clone());
  return copies;
}

TEST_CASE("between backwards that are not the last no gradient is shown that is still to be reduced",
          "[runtime][full_parameters]") {
  CHECK(on_ranks(2, [](Rank& rank) {
    auto plain = plain_chain();
    ShardedChain chain(rank.mesh());
    auto& root = chain.root[0];
    const auto show = [&] { FullParameters scope(*chain.model, {.writeback = false, .with_grads = true}); };
    root.set_is_last_backward(false);
    chain.loss(rank.index(), 0).backward();
    rank.check_throws<StateError>(show, {"FullParameters", "set_is_last_backward"}, "one is to follow");
    root.set_is_last_backward(true);
    chain.loss(rank.index(), 1).backward();
    const auto expected = summed_gradients(plain, 2, {0, 1});
    const auto check = [&](const std::string& what) {
      FullParameters scope(*chain.model, {.writeback = false, .with_grads = true});
      for (const auto& [name, gradient] : expected)
        rank.check_close(chain.model->named_parameters()[name].grad(), gradient, what + name);
    };
    check("behind the last: ");
    chain.model->zero_grad();
    root.set_manual_backward_finalization(true);
    for (int step : {0, 1}) chain.loss(rank.index(), step).backward();
    rank.check_throws<StateError>(show, {"FullParameters", "finaliz"}, "not finalized");
    root.finalize_backward();
    check("finalized: ");
  }));
}

TEST_CASE("in the scope the module is the plain one, and afterwards the sharded one again", "[runtime][full_parameters]") {
  for (bool casts : {false, true})
    on_odd_cases([&](Rank& rank, const OddCase& odd) {
      auto plain = plain_odd(), model = plain_odd();
      MixedPrecisionPolicy policy;
      if (casts) policy.param_dtype = at::kBFloat16;
      shard_odd(model, rank, odd, policy);
      auto before = model->parameters();
      auto values = clones(before);
      std::vector<int64_t> versions;
      for (auto& parameter : before) versions.push_back(parameter._version());
      {
        FullParameters scope(model);
        check_whole(rank, *model, *plain, odd.name);
        rank.check(model->lin->weight.is_same(model->lin->named_parameters()["weight"]), "entry and member are one tensor");
        rank.check(model->head->weight.is_same(model->embed->weight), "tied members too");
        rank.check_equal(model->lin->weight.data_ptr<float>()[0], plain->lin->weight.data_ptr<float>()[0], "raw memory");
      }
      auto after = model->parameters();
      rank.check_equal(after.size(), before.size(), "as many as before");
      for (size_t i = 0; i < after.size(); ++i) {
        rank.check(after[i].is_same(before[i]), odd.name + ": the same sharded tensors");
        rank.check_identical(after[i].detach(), values[i], odd.name + ": the same values");
        rank.check_equal(int64_t(after[i]._version()), versions[i], odd.name + ": nothing was written");
      }
      rank.check(model->lin->weight.scalar_type() == (casts ? at::kBFloat16 : at::kFloat), "the unsharded parameter's dtype is back");
    });
}

TEST_CASE("what is written in the scope is what is trained afterwards", "[runtime][full_parameters]") {
  on_odd_cases([](Rank& rank, const OddCase& odd) {
    auto plain = plain_odd(), model = plain_odd();
    shard_odd(model, rank, odd);
    model->eval();
    plain->eval();
    torch::optim::SGD optimizer(model->parameters(), 0.1), plain_optimizer(plain->parameters(), 0.1);
    for (int step = 0; step < 3; ++step) {
      auto write = [&](Odd& net) {
        at::NoGradGuard no_grad;
        net->lin->weight.data_ptr<float>()[7] = 0.25F * step;  // past the dispatcher
        net->scale.fill_(1 + step);
        net->conv->weight.mul_(1.5);
        net->named_parameters()["embed.weight"][3].fill_(0.5);
        net->frozen.add_(1);
        net->table.mul_(2);
        net->lin->bias.data().fill_(0.125);
        net->plain.mul_(-1);
      };
      write(plain);
      {
        FullParameters scope(model);
        write(model);
      }
      {
        FullParameters scope(model, kReadOnly);
        check_whole(rank, *model, *plain, fmt::format("{}, step {}", odd.name, step));
      }
      Inputs in(0, step), again(0, step);
      auto loss = model->loss(in), expected = plain->loss(again);
      rank.check_close(loss.detach(), expected.detach(), "loss");
      loss.backward();
      expected.backward();
      optimizer.step();
      plain_optimizer.step();
      optimizer.zero_grad();
      plain->zero_grad();
      FullParameters scope(model, kReadOnly);
      auto found = unique_parameters(*model), full = unique_parameters(*plain);
      for (size_t i = 0; i < full.size(); ++i)
        rank.check_close(found[i].second.detach(), full[i].second.detach(), fmt::format("{}, step {}: {}", odd.name, step, full[i].first));
      // Rounding must not add up: the next step starts from equal values.
      at::NoGradGuard no_grad;
      for (size_t i = 0; i < full.size(); ++i) full[i].second.copy_(found[i].second);
    }
  });
}

TEST_CASE("each rank's writes count for the elements it owns", "[runtime][full_parameters]") {
  on_ranks(3, [](Rank& rank) {
    auto model = plain_chain(1, 7);
    fully_shard(model, {.mesh = rank.mesh()});
    {
      FullParameters scope(model);
      torch::NoGradGuard no_grad;
      for (auto& parameter : model->parameters()) parameter.fill_(rank.index());
    }
    for (auto& parameter : model->parameters()) {
      auto whole = dtensor_of(parameter).full_tensor();
      for (int owner = 0; owner < 3; ++owner) {
        auto rows = rows_of(whole, owner, 3);
        rank.check_identical(rows, torch::full_like(rows, owner), fmt::format("rows of rank {}", owner));
      }
    }
  });
}

TEST_CASE("without writeback what was written is dropped", "[runtime][full_parameters]") {
  on_odd_cases([](Rank& rank, const OddCase& odd) {
    auto plain = plain_odd(), model = plain_odd();
    shard_odd(model, rank, odd);
    {
      FullParameters scope(model, kReadOnly);
      at::NoGradGuard no_grad;
      for (auto& [name, parameter] : unique_parameters(*model))
        if (name != "plain") parameter.zero_();  // which is not sharded
    }
    FullParameters scope(model, kReadOnly);
    check_whole(rank, *model, *plain, odd.name);
  });
}

TEST_CASE("rank0_only shows full parameters on the first rank of the mesh", "[runtime][full_parameters]") {
  on_odd_cases([](Rank& rank, const OddCase& odd) {
    auto plain = plain_odd(), model = plain_odd();
    shard_odd(model, rank, odd);
    auto before = model->parameters();
    rank.check_throws<UsageError>([&] { FullParameters scope(model, {.rank0_only = true}); }, {"rank0_only", "writeback"}, odd.name);
    {
      FullParameters scope(model, {.writeback = false, .rank0_only = true, .offload_to_cpu = true});
      if (rank.index() == 0) {
        check_whole(rank, *model, *plain, odd.name);
      } else {
        auto now = model->parameters();
        for (size_t i = 0; i < now.size(); ++i) rank.check(now[i].is_same(before[i]), odd.name + ": sharded elsewhere");
      }
    }
    for (size_t i = 0; i < before.size(); ++i) rank.check(model->parameters()[i].is_same(before[i]), odd.name);
  });
}

TEST_CASE("with_grads shows averaged gradients, and takes them back", "[runtime][full_parameters]") {
  for (bool replicate_only : {false, true})
    on_ranks(3, [&](Rank& rank) {
      auto plain = plain_chain(2, 5);
      auto model = plain_chain(2, 5);
      fully_shard(model->layers[0], {.mesh = rank.mesh(), .replicate_only = replicate_only});
      fully_shard(model, {.mesh = rank.mesh(), .replicate_only = replicate_only});
      auto expected = averaged_gradients(plain, 3);
      Inputs in(rank.index(), 0);
      model->forward(in.normal({4, 5})).square().mean().backward();
      {
        FullParameters scope(model);
        for (auto& parameter : model->parameters()) rank.check(!parameter.grad().defined(), "not shown unless asked for");
      }
      {
        FullParameters scope(model, {.with_grads = true});
        auto found = unique_parameters(*model);
        for (size_t i = 0; i < found.size(); ++i) {
          rank.check_close(found[i].second.grad(), expected[i].second, found[i].first);
          found[i].second.mutable_grad().mul_(2);
        }
        found[1].second.mutable_grad() = torch::ones({5});
        found[0].second.mutable_grad().reset();
      }
      auto found = unique_parameters(*model);
      rank.check(!found[0].second.grad().defined(), "taken away");
      rank.check(at::equal(found[1].second.grad(), torch::ones_like(found[1].second)), "replaced");
      for (size_t i = 2; i < found.size(); ++i)
        rank.check_close(grad_dtensor_of(found[i].second).full_tensor(), 2 * expected[i].second, found[i].first + " doubled");
      for (auto& [name, parameter] : found)
        rank.check_identical(fsdp::unsharded(parameter).grad(), parameter.grad(), name + ": the same on the unsharded parameter");
    });
}

TEST_CASE("gradients that only some ranks have are an error on all", "[runtime][full_parameters]") {
  on_ranks(2, [](Rank& rank) {
    auto model = plain_chain(1);
    fully_shard(model, {.mesh = rank.mesh()});
    if (rank.index() == 1) model->parameters()[0].mutable_grad() = torch::zeros_like(model->parameters()[0]);
    rank.check_throws<StateError>([&] { FullParameters scope(model, {.with_grads = true}); }, {"gradients", "ranks differ"}, "grads");
    FullParameters scope(model);
    rank.check(model->head->weight.is_same(model->head->parameters()[0]), "and it works without them");
  });
}

TEST_CASE("a scope is refused inside a forward, a backward, a forward scope and another scope", "[runtime][full_parameters]") {
  on_ranks(2, [](Rank& rank) {
    ShardedChain chain(rank.mesh());
    auto open = [&] { FullParameters scope(chain.model); };
    int hooks = 0;
    chain.model->after_layer = [&](int) {
      ++hooks;
      rank.check_throws<StateError>(open, {"forward", "backward"}, "in a forward");
    };
    auto loss = chain.loss(rank.index(), 0);
    loss.register_hook([&](const Tensor&) {
      ++hooks;
      rank.check_throws<StateError>(open, {"forward", "backward"}, "in a backward");
    });
    rank.check_throws<StateError>(open, {"backward", "last forward"}, "before the backward");
    loss.backward();
    rank.check_equal(hooks, 4, "hooks");
    chain.model->after_layer = {};
    {
      auto scope = forward_scope(chain.root[0]);
      rank.check_throws<StateError>(open, {"scope"}, "in a forward scope");
    }
    {
      FullParameters outer(chain.model->layers[0]);
      rank.check_throws<StateError>([&] { FullParameters inner(chain.model->layers[0]); }, {"another scope"}, "twice");
      rank.check_throws<StateError>(open, {"another scope"}, "around");
      FullParameters beside(chain.model->layers[1]);
      rank.check(chain.model->layers[1]->weight.is_same(chain.model->layers[1]->parameters()[0]), "beside");
    }
    chain.step(rank.index());
    open();
  });
}

TEST_CASE("a step cannot begin in the scope, and can after it", "[runtime][full_parameters]") {
  on_ranks(2, [](Rank& rank) {
    ShardedChain chain(rank.mesh());
    auto plain = plain_chain();
    Inputs in(rank.index(), 0);
    auto x = in.normal({4, 6});
    {
      FullParameters scope(chain.model);
      {
        at::NoGradGuard no_grad;
        rank.check_identical(chain.model->forward(x), plain->forward(x), "a forward without autograd");
      }
      rank.check_throws<StateError>([&] { chain.model->forward(x).sum().backward(); }, {"full parameters"}, "a backward");
      rank.check_throws<StateError>([&] { auto inner = forward_scope(chain.root[0]); }, {"full parameters"}, "a scope");
    }
    for (auto& parameter : chain.model->parameters()) fsdp::unsharded(parameter).mutable_grad().reset();
    for (int step = 0; step < 2; ++step) {
      chain.model->zero_grad();
      chain.loss(rank.index(), step).backward();
      check_gradients(rank, *chain.model, averaged_gradients(plain, 2, step), fmt::format("step {}", step));
    }
  });
}

TEST_CASE("leaving by an exception restores the module and hangs nobody", "[runtime][full_parameters]") {
  on_ranks(2, [](Rank& rank) {
    ShardedChain chain(rank.mesh());
    auto before = chain.model->parameters();
    try {
      FullParameters scope(chain.model);
      at::NoGradGuard no_grad;
      chain.model->head->bias.fill_(3);
      if (rank.index() == 1) throw std::runtime_error("on one rank");
    } catch (const std::runtime_error&) {
    }
    for (size_t i = 0; i < before.size(); ++i) rank.check(chain.model->parameters()[i].is_same(before[i]), "restored");
    rank.check_identical(dtensor_of(chain.model->head->bias).full_tensor(), torch::full({2}, 3.F), "and written back");
    chain.step(rank.index());
  });
}

TEST_CASE("a scope of an inner module does not make it a root", "[runtime][full_parameters]") {
  on_ranks(2, [](Rank& rank) {
    auto plain = plain_chain(), model = plain_chain();
    for (auto& layer : model->layers) {
      fully_shard(layer, {.mesh = rank.mesh()});
      {
        FullParameters scope(layer);
        rank.check_throws<StateError>([&] { fully_shard(model, {.mesh = rank.mesh()}); }, {"full parameters"}, "while shown");
      }
      fsdp::apply(layer, [](torch::nn::Module&) {});
      state_dict(layer);
    }
    auto root = fully_shard(model, {.mesh = rank.mesh()});
    rank.check_equal(root.sharded_modules().size(), size_t{4}, "one root over all");
    Inputs in(rank.index(), 0);
    model->forward(in.normal({4, 6})).square().mean().backward();
    check_gradients(rank, *model, averaged_gradients(plain, 2), "after the scopes");
  });
}

TEST_CASE("without recursion the parameters of sharded modules below stay sharded", "[runtime][full_parameters]") {
  on_ranks(2, [](Rank& rank) {
    ShardedChain chain(rank.mesh());
    auto plain = plain_chain();
    FullParameters scope(chain.model, {.recurse = Recurse::kNo});
    rank.check_identical(chain.model->head->parameters()[0].detach(), plain->head->weight.detach(), "its own");
    rank.check(is_fsdp_parameter(chain.model->layers[0]->parameters()[0]), "not that of a unit below");
    at::NoGradGuard no_grad;
    rank.check_identical(chain.model->layers[0]->weight.clone(), plain->layers[0]->weight.detach(), "whose unsharded parameter still gathers");
  });
}

TEST_CASE("apply visits modules as LibTorch does, with each one's own parameters whole", "[runtime][full_parameters]") {
  on_odd_cases([](Rank& rank, const OddCase& odd) {
    auto plain = plain_odd(), model = plain_odd();
    shard_odd(model, rank, odd);
    auto fill = [](torch::nn::Module& module) {
      at::NoGradGuard no_grad;
      int64_t value = 1;
      for (auto& parameter : module.parameters(/*recurse=*/false)) parameter.mul_(2).add_(value++);
      if (auto* linear = module.as<torch::nn::Linear>()) linear->weight.data_ptr<float>()[1] = 7;
    };
    std::vector<std::string> names, plain_names;
    plain->apply([&](const std::string& name, torch::nn::Module&) { plain_names.push_back(name); });
    fsdp::apply(model, [&](const std::string& name, torch::nn::Module& module) {
      names.push_back(name);
      for (auto& other : model->modules())
        if (other.get() != &module)
          for (auto& parameter : other->parameters(false))
            rank.check(parameter.is_same(model->plain) || is_fsdp_parameter(parameter), "others are sharded");
    });
    rank.check_equal(names, plain_names, odd.name + ": order");
    fsdp::apply(model, fill);
    fill(*plain);
    for (auto& child : plain->children()) fill(*child);  // twice the tied weight, in both
    FullParameters scope(model, kReadOnly);
    check_whole(rank, *model, *plain, odd.name);
  });
}

TEST_CASE("a plain module shows what it has", "[runtime][full_parameters]") {
  auto plain = plain_chain(1);
  auto before = plain->parameters();
  FullParameters scope(plain);
  CHECK(plain->parameters()[0].is_same(before[0]));
}

}  // namespace
}  // namespace fsdp::test
