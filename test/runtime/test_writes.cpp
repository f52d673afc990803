#include <catch2/catch.hpp>

#include <sstream>

#include "support/models.hpp"

// Writes to unsharded parameters and replaced tensors reach the shards or are refused by name.

namespace fsdp::test {
namespace {

namespace nn = torch::nn;
using at::Tensor;

/// One linear layer below a root, and its plain twin.
struct Subject {
  explicit Subject(const DeviceMesh& mesh)
      : model(seeded(5, [] { return Chain(2, 5); })), plain(seeded(5, [] { return Chain(2, 5); })) {
    for (auto& layer : model->layers) fully_shard(layer, {.mesh = mesh});
    fully_shard(model, {.mesh = mesh});
  }
  Tensor& weight() { return model->layers[0]->weight; }
  Tensor& plain_weight() { return plain->layers[0]->weight; }
  Chain model, plain;
};

/// What `write` does to the plain weight it does to the sharded one: in its rows now, in the next
/// forward, and still after a step.
void check_write(Rank& rank, const std::string& what, const std::function<void(Tensor&)>& write, bool after_a_step,
                 bool draws_random_numbers = false) {
  Subject subject(rank.mesh());
  Inputs inputs(rank.index(), 0);
  auto x = inputs.normal({3, 5});
  if (after_a_step) {
    subject.model->forward(x).sum().backward();
    subject.model->zero_grad();
  }
  if (draws_random_numbers) {
    // The ranks take turns at LibTorch's generator, so nothing may be left to gather.
    auto layer = *find_fsdp_module(*subject.model->layers[0]);
    layer.unshard();
    seeded(3, [&] { return write(subject.plain_weight()), 0; });
    seeded(3, [&] { return write(subject.weight()), 0; });
    layer.reshard();
  } else {
    write(subject.plain_weight());
    write(subject.weight());
  }
  auto expected = subject.plain_weight().detach();
  rank.check_identical(sharded(subject.weight()).detach(), rows_of(expected, rank.index(), rank.size()), what + ": shard");
  rank.check_close(subject.model->forward(x), subject.plain->forward(x), what + ": forward");
  subject.model->forward(x).sum().backward();
  rank.check_identical(dtensor_of(subject.weight()).full_tensor().detach(), expected, what + ": after a step");
  at::NoGradGuard no_grad;
  rank.check_identical(subject.weight().clone(), expected, what + ": read back");
}

TEST_CASE("every write through an operator to an unsharded parameter reaches the shards", "[runtime][writes]") {
  on_ranks(2, [](Rank& rank) {
    auto values = torch::arange(25.).view({5, 5});
    std::vector<std::pair<std::string, std::function<void(Tensor&)>>> writes = {
        {"init::constant_", [](Tensor& w) { nn::init::constant_(w, 0.25); }},
        {"init::eye_", [](Tensor& w) { nn::init::eye_(w); }},
        {"copy_", [&](Tensor& w) { at::NoGradGuard g; w.copy_(values); }},
        {"mul_", [](Tensor& w) { at::NoGradGuard g; w.mul_(3); }},
        {"data().fill_", [](Tensor& w) { w.data().fill_(0.5); }},
        {"detach().add_", [](Tensor& w) { w.detach().add_(1); }},
        {"a row through a view", [](Tensor& w) { at::NoGradGuard g; w[3].fill_(7); }},
        {"a narrow view", [](Tensor& w) { at::NoGradGuard g; w.narrow(1, 1, 2).zero_(); }},
        {"a transposed view", [](Tensor& w) { at::NoGradGuard g; w.t()[2].fill_(-1); }},
        {"index_put_", [](Tensor& w) { at::NoGradGuard g; w.index_put_({4}, torch::ones({5})); }},
        {"out=", [&](Tensor& w) { at::NoGradGuard g; torch::add_out(w, values, values); }},
        {"addmm_", [&](Tensor& w) { at::NoGradGuard g; w.addmm_(values, values); }},
        {"_foreach_mul_", [](Tensor& w) { at::NoGradGuard g; at::_foreach_mul_({w}, 2); }},
        {"masked_fill_", [](Tensor& w) { at::NoGradGuard g; w.masked_fill_(w > 0, 9); }},
    };
    for (auto& [what, write] : writes)
      for (bool after_a_step : {false, true}) check_write(rank, what, write, after_a_step);
    for (bool after_a_step : {false, true}) {
      check_write(rank, "init::xavier_uniform_", [](Tensor& w) { nn::init::xavier_uniform_(w); }, after_a_step, true);
      check_write(rank, "data().normal_", [](Tensor& w) { w.data().normal_(); }, after_a_step, true);
    }
  });
}

TEST_CASE("between steps a write to an unsharded parameter is computed in the dtype of the shards, not that of the gather",
          "[runtime][writes]") {
  on_ranks(2, [](Rank& rank) {
    auto plain = plain_chain(1, 5);
    ShardedChain chain(plain_chain(1, 5), {.mesh = rank.mesh(), .mp_policy = {.param_dtype = at::kBFloat16}});
    for (int step = 0; step < 2; ++step) {
      chain.step(rank.index(), step);
      at::NoGradGuard no_grad;
      plain->layers[0]->weight.mul_(0.998);
      chain.model->layers[0]->weight.mul_(0.998);
      plain->layers[0]->bias.data().add_(1e-4);
      chain.model->layers[0]->bias.data().add_(1e-4);
      for (const auto& [found, expected] : {std::pair(chain.model->layers[0]->weight, plain->layers[0]->weight),
                                            std::pair(chain.model->layers[0]->bias, plain->layers[0]->bias)})
        rank.check_identical(sharded(found).detach(), rows_of(expected, rank.index(), rank.size()), "the shard");
    }
  });
}

TEST_CASE("a write and then a use in one forward, with its backward", "[runtime][writes]") {
  on_ranks(2, [](Rank& rank) {
    Subject subject(rank.mesh());
    Inputs inputs(0, 0);
    auto x = inputs.normal({3, 5});
    for (int step = 0; step < 3; ++step) {
      for (auto model : {subject.model, subject.plain}) {
        {
          at::NoGradGuard no_grad;
          model->layers[0]->weight.clamp_(-0.1, 0.1).add_(0.01);
        }
        model->zero_grad();
        model->forward(x).square().sum().backward();
      }
      rank.check_close(sharded(subject.weight()).grad(), rows_of(subject.plain_weight().grad(), rank.index(), 2),
                       fmt::format("step {}", step));
    }
  });
}

TEST_CASE("reset_parameters and apply on a sharded module reach the shards", "[runtime][writes]") {
  on_ranks(2, [](Rank& rank) {
    Subject subject(rank.mesh());
    subject.model->apply([](nn::Module& module) {
      if (auto* linear = module.as<nn::Linear>()) linear->reset_parameters();
    });
    // Every rank drew numbers of its own, so what counts is that all agree on each row's owner.
    auto plain = unique_parameters(*subject.plain);
    auto found = unique_parameters(*subject.model);
    at::NoGradGuard no_grad;
    for (size_t i = 0; i < plain.size(); ++i) {
      auto whole = dtensor_of(found[i].second).full_tensor();
      rank.check_identical(fsdp::unsharded(found[i].second).clone(), whole, plain[i].first + ": unsharded parameter and shards agree");
      rank.check(!at::allclose(whole, plain[i].second), plain[i].first + " has changed");
      rank.check(whole.abs().max().item<float>() <= 1 / std::sqrt(5.f) + 1e-6, plain[i].first + ": in Linear's bounds");
    }
  });
}

TEST_CASE("a write to the sharded parameter is what the next forward gathers", "[runtime][writes]") {
  on_ranks(2, [](Rank& rank) {
    Subject subject(rank.mesh());
    auto x = torch::ones({1, 5});
    for (int step = 0; step < 3; ++step) {
      {
        at::NoGradGuard no_grad;
        for (auto& parameter : subject.model->parameters()) parameter.fill_(0.1 * (step + 1));
        for (auto& parameter : subject.plain->parameters()) parameter.fill_(0.1 * (step + 1));
      }
      rank.check_close(subject.model->forward(x), subject.plain->forward(x), fmt::format("step {}", step));
      subject.model->forward(x).sum().backward();
    }
  });
}

TEST_CASE("set_data of the whole keeps this rank's part, and of a part is refused: to_local takes that",
          "[runtime][writes]") {
  on_ranks(2, [](Rank& rank) {
    auto x = torch::ones({1, 5});
    const auto whole = torch::arange(25.).view({5, 5}) / 25;
    for (const bool is_whole : {false, true}) {
      Subject subject(rank.mesh());
      subject.model->forward(x).sum().backward();
      subject.model->zero_grad();
      const auto part = rows_of(whole, rank.index(), 2);
      const auto parameter = sharded(subject.weight());
      if (is_whole) {
        parameter.set_data(whole.clone());
      } else {
        rank.check_throws<UsageError>([&] { parameter.set_data(part.clone()); },
                                      {"layer0.weight", "(5, 5)", rank.index() == 0 ? "(3, 5)" : "(2, 5)", "to_local"}, "a part");
        rank.check_close(subject.model->forward(x), subject.plain->forward(x), "nothing has changed");
        const at::NoGradGuard no_grad;
        to_local(parameter).copy_(part);
      }
      {
        at::NoGradGuard no_grad;
        subject.plain_weight().copy_(whole);
      }
      rank.check_close(subject.model->forward(x), subject.plain->forward(x), "the new values are used");
      subject.model->forward(x).sum().backward();
      const auto now = sharded(subject.weight());
      rank.check(now.is_same(parameter), "the tensor that an optimizer knows");
      rank.check_identical(now.detach(), part, "and kept");
      at::NoGradGuard no_grad;
      now.mul_(2);
      subject.plain_weight().mul_(2);
      rank.check_close(subject.model->forward(x), subject.plain->forward(x), "the optimizer's next write is seen");
    }
  });
}

TEST_CASE("a sharded parameter that was replaced by what does not fit is refused by name, and keeps its values",
          "[runtime][writes]") {
  on_ranks(2, [](Rank& rank) {
    auto x = torch::ones({1, 5});
    const std::vector<std::pair<Tensor, std::vector<std::string>>> replacements = {
        {torch::ones({4, 5}), {"(4, 5)", "the whole's sizes (5, 5)"}},
        {torch::ones({5, 5}, at::kDouble), {"Float on cpu", "Double on cpu", "fsdp::to(module", "Nothing was changed"}},
        {torch::ones({5, 5}, at::kMeta), {"Float on cpu", "Float on meta", "fsdp::to(module", "Nothing was changed"}},
    };
    for (const auto& [replacement, parts] : replacements) {
      Subject subject(rank.mesh());
      const auto expected = subject.plain->forward(x);
      subject.model->forward(x).sum().backward();
      // set_data itself keeps meta tensors out; a load that swaps what is behind the tensor does not ask it.
      auto* parameter = sharded(subject.weight()).unsafeGetTensorImpl();
      auto said = parts;
      said.insert(said.end(), "layer0.weight");
      rank.check_throws<Error>([&] { parameter->shallow_copy_from(replacement.getIntrusivePtr()); }, said, parts[0]);
      rank.check_close(subject.model->forward(x), expected, parts[0] + ": the next forward");
    }
  });
}

TEST_CASE("what replaces a sharded parameter's tensor counts at once", "[runtime][writes]") {
  for (int world_size : {1, 2})
    on_ranks(world_size, [](Rank& rank) {
      Subject subject(rank.mesh());
      auto x = torch::ones({1, 5});
      subject.model->forward(x).sum().backward();
      subject.model->zero_grad();
      auto parameter = sharded(subject.weight());
      const auto shows = [&](float value, const std::string& what) {
        const auto expected = torch::full({5, 5}, value);
        rank.check(is_fsdp_parameter(parameter), what + ": still the parameter");
        rank.check_identical(full_tensor(parameter), expected, what + ": full_tensor of it");
        rank.check_identical(full_tensor(subject.weight()), expected, what + ": full_tensor of the member");
        rank.check_identical(dtensor_of(parameter).full_tensor(), expected, what + ": its DTensor");
        rank.check_identical(subject.weight().detach().clone(), expected, what + ": the member");
      };
      parameter.set_data(torch::full_like(parameter, 0.25));
      shows(0.25, "this rank's part");
      parameter.set_data(torch::full({5, 5}, 0.75));
      shows(0.75, "the whole");
      parameter.set_data(subject.weight());
      parameter.set_data(subject.weight().t());
      parameter.set_data(parameter);
      shows(0.75, "itself");
      const auto parameters = subject.model->parameters();
      {
        at::NoGradGuard no_grad;
        const auto values = nn::utils::parameters_to_vector(parameters);
        nn::utils::vector_to_parameters(torch::full_like(values, 0.5), parameters);
      }
      shows(0.5, "vector_to_parameters");
      rank.check_close(parameter.square().sum().detach(), torch::full({}, 25 * 0.25), "a penalty");
      subject.model->forward(x).sum().backward();
      const auto set = [&] { parameter.set_data(torch::zeros({7})); };
      rank.check_throws<UsageError>(set, {"layer0.weight", "7"}, "other sizes");
      shows(0.5, "after a refusal");
    });
}

TEST_CASE("torch::load of a rank's own file into a sharded module is seen", "[runtime][writes]") {
  on_ranks(2, [](Rank& rank) {
    Subject subject(rank.mesh());
    auto x = torch::ones({1, 5});
    auto expected = subject.model->forward(x).detach().clone();
    subject.model->forward(x).sum().backward();
    std::stringstream file;
    torch::save(subject.model, file);
    {
      at::NoGradGuard no_grad;
      for (auto& parameter : subject.model->parameters()) parameter.zero_();
    }
    rank.check_close(subject.model->forward(x), torch::zeros({1, 2}), "zeroed");
    torch::load(subject.model, file);
    rank.check_close(subject.model->forward(x), expected, "loaded");
  });
}

TEST_CASE("a replaced gradient of a sharded parameter is what the optimizer and the next backward see",
          "[runtime][writes]") {
  on_ranks(2, [](Rank& rank) {
    Subject subject(rank.mesh());
    auto x = torch::ones({1, 5});
    subject.model->forward(x).sum().backward();
    auto parameter = sharded(subject.weight());
    auto first = parameter.grad().clone();
    parameter.mutable_grad() = torch::ones_like(parameter);
    subject.model->forward(x).sum().backward();
    rank.check_close(sharded(subject.weight()).grad(), first + 1, "added to the replacement");
  });
}

TEST_CASE("what would take an unsharded parameter's storage or shape away is refused by name", "[runtime][writes]") {
  on_ranks(2, [](Rank& rank) {
    std::vector<std::pair<std::string, std::function<void(Tensor&)>>> writes = {
        {"set_", [](Tensor& w) { at::NoGradGuard g; w.set_(torch::ones({4, 5})); }},
        {"resize_", [](Tensor& w) { at::NoGradGuard g; w.resize_({7, 7}); }},
        {"t_", [](Tensor& w) { at::NoGradGuard g; w.t_(); }},
        {"unsqueeze_", [](Tensor& w) { at::NoGradGuard g; w.unsqueeze_(0); }},
    };
    for (auto& [what, write] : writes) {
      Subject subject(rank.mesh());
      auto x = torch::ones({1, 5});
      rank.check_throws<Error>([&] { write(subject.weight()); }, {"layer0.weight"}, what);
      rank.check_close(subject.model->forward(x), subject.plain->forward(x), what + ": nothing changed");
      subject.model->forward(x).sum().backward();
    }
  });
}

// No operator runs here.
TEST_CASE("set_data on an unsharded parameter writes the parameter, and the next step has it", "[runtime][writes]") {
  on_ranks(2, [](Rank& rank) {
    Subject subject(rank.mesh());
    auto x = torch::ones({1, 5});
    subject.model->forward(x).sum().backward();
    subject.weight().set_data(torch::ones({5, 5}));
    rank.check_close(full_tensor(subject.weight()), torch::ones({5, 5}), "the parameter");
    subject.model->forward(x).sum().backward();
    rank.check_close(subject.weight().detach().clone(), torch::ones({5, 5}), "what the next step has computed with");
  });
}

TEST_CASE("a write is seen by the next forward of a group that was used last and is used first",
          "[runtime][writes]") {
  on_ranks(2, [](Rank& rank) {
    auto net = seeded(5, [] { return nn::Linear(5, 4); });
    fully_shard(net, {.mesh = rank.mesh()});
    const auto x = torch::ones({2, 5});
    const auto before = net->forward(x).detach();
    {
      at::NoGradGuard no_grad;
      for (auto& parameter : net->parameters()) parameter.mul_(2);
    }
    const auto after = net->forward(x);
    rank.check_close(after, 2 * before, "forward");
    after.sum().backward();
    rank.check_close(net->parameters()[1].grad(), torch::full({2}, 2.F), "backward through the new values");
  });
}

TEST_CASE("a write within a step outlives an integer reshard", "[runtime][writes]") {
  on_ranks(4, [](Rank& rank) {
    auto make = [] { return seeded(5, [] { return Chain(3, 8); }); };
    auto model = make(), plain = make();
    for (auto& layer : model->layers) fully_shard(layer, {.mesh = rank.mesh(), .reshard_after_forward = 2});
    fully_shard(model, {.mesh = rank.mesh()});
    const auto x = torch::ones({1, 8});
    for (int step = 0; step < 3; ++step) {
      at::Tensor loss, plain_loss;
      for (auto [net, sum] : {std::pair(model, &loss), std::pair(plain, &plain_loss)}) {
        *sum = net->forward(x).sum();
        {
          at::NoGradGuard no_grad;
          net->layers[1]->bias.add_(0.5);  // autograd has not saved it
        }
        *sum = *sum + net->forward(x).sum();
        net->zero_grad();
        sum->backward();
      }
      rank.check_close(loss, plain_loss, fmt::format("step {}: both forwards", step));
      rank.check_close(model->layers[0]->parameters()[0].grad(),
                       rows_of(plain->layers[0]->weight.grad(), rank.index(), 4),
                       fmt::format("step {}: a gradient", step));
    }
  });
}

TEST_CASE("a write between forward and backward is seen later by a group that stays", "[runtime][writes]") {
  on_ranks(2, [](Rank& rank) {
    Subject subject(rank.mesh());
    auto root = *find_fsdp_module(*subject.model);
    root.set_reshard_after_forward(false);
    root.set_reshard_after_backward(false);
    const auto x = torch::ones({1, 5});
    for (int step = 0; step < 3; ++step) {
      auto loss = subject.model->forward(x).sum(), plain_loss = subject.plain->forward(x).sum();
      rank.check_close(loss, plain_loss, fmt::format("step {}", step));
      {
        at::NoGradGuard no_grad;
        sharded(subject.model->layers[0]->bias).add_(0.25);
        subject.plain->layers[0]->bias.add_(0.25);
      }
      loss.backward();
      plain_loss.backward();
    }
  });
}

TEST_CASE("a write through a DTensor's local tensor is a write to the parameter", "[runtime][writes]") {
  on_ranks(2, [](Rank& rank) {
    Subject subject(rank.mesh());
    const auto x = torch::ones({1, 5});
    subject.model->forward(x);
    find_fsdp_module(*subject.model->layers[0])->unshard();
    {
      at::NoGradGuard no_grad;
      dtensor_of(subject.weight()).to_local().fill_(0.5);
      subject.plain_weight().fill_(0.5);
    }
    rank.check_close(subject.model->forward(x), subject.plain->forward(x), "the next forward");
  });
}

}  // namespace
}  // namespace fsdp::test
