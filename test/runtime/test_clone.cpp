#include <catch2/catch.hpp>

#include "support/models.hpp"
#include "support/odd_model.hpp"

// Independent sharded copies, EMA, and what LibTorch's own clone() leaves behind.

namespace fsdp::test {
namespace {

namespace nn = torch::nn;
using at::Tensor;

void check_equal_state(const Rank& rank, const nn::Module& found, const nn::Module& expected, const std::string& what) {
  auto dict = state_dict(expected), copy = state_dict(found);
  rank.check_equal(copy.entries.size(), dict.entries.size(), what + ": entries");
  rank.check(copy.other_names == dict.other_names, what + ": ties");
  for (auto& item : dict.entries) {
    const auto* entry = copy.find(item.key());
    rank.check(entry != nullptr, what + ": has " + item.key());
    if (entry != nullptr) rank.check_identical(entry->value, item.value().value, what + ": " + item.key());
    if (entry != nullptr) rank.check(entry->value.strides() == item.value().value.strides(), what + ": strides of " + item.key());
  }
}

Odd clone_odd(Odd& model) {
  // clone() draws random numbers, and the ranks take turns at the generator.
  return seeded(3, [&] { return Odd(clone(model)); });
}

TEST_CASE("a clone is sharded like its original and independent of it", "[runtime][clone]") {
  for (bool casts : {false, true})
    on_odd_cases([&](Rank& rank, const OddCase& odd) {
      auto model = plain_odd();
      MixedPrecisionPolicy policy;
      if (casts) policy = {.param_dtype = at::kBFloat16, .buffer_dtype = at::kDouble};
      auto root = shard_odd(model, rank, odd, policy);
      root.set_reshard_after_forward(false);
      root.set_gradient_divide_factor(3);
      rank.log().clear();
      auto copy = clone_odd(model);
      rank.check_equal(rank.log().calls.size(), size_t{0}, "nothing is communicated");
      check_equal_state(rank, *copy, *model, odd.name);

      auto copied = *find_fsdp_module(*copy);
      rank.check(copied.is_root(), "a root of its own");
      auto units = root.sharded_modules(), copied_units = copied.sharded_modules();
      rank.check_equal(copied_units.size(), units.size(), "as many units");
      for (size_t i = 0; i < std::min(units.size(), copied_units.size()); ++i) {
        rank.check_equal(copied_units[i].name(), units[i].name(), "name of a unit");
        rank.check(copied_units[i].placements() == units[i].placements() && copied_units[i].mesh() == units[i].mesh(), "mesh");
      }
      auto parameters = unique_parameters(*model), copies = unique_parameters(*copy);
      rank.check_equal(copies.size(), parameters.size(), "as many parameters");
      for (size_t i = 0; i < copies.size(); ++i) {
        auto& [name, parameter] = copies[i];
        rank.check_equal(name, parameters[i].first, "name of a parameter");
        rank.check(parameter.sizes() == parameters[i].second.sizes(), name + ": the same sizes");
        rank.check(to_local(parameter).sizes() == to_local(parameters[i].second).sizes(), name + ": the same rows");
        rank.check(parameter.requires_grad() == parameters[i].second.requires_grad(), name + ": requires_grad");
        rank.check(is_fsdp_parameter(parameter) == (name != "plain"), name + ": ignored as before");
        const auto piece = to_local(parameter);
        rank.check(!piece.is_alias_of(to_local(parameters[i].second)) || piece.numel() == 0, name + ": own memory");
      }
      rank.check(copy->embed->weight.is_same(copy->head->weight), "tied");
      rank.check(copy->lin->weight.scalar_type() == model->lin->weight.scalar_type(), "mixed precision");

      if (!casts) {  // and the controls came along: the divide factor shows in the gradients
        for (auto* net : {&model, &copy}) {
          Inputs in(0, 0);
          (*net)->eval();
          (*net)->loss(in).backward();
        }
        for (size_t i = 0; i < copies.size(); ++i)
          rank.check_close(copies[i].second.grad(), parameters[i].second.grad(), copies[i].first + ": gradient");
      }
      auto before = state_dict(model);
      at::NoGradGuard no_grad;
      for (auto& parameter : copy->parameters()) parameter.zero_();
      copy->counts.zero_();
      auto after = state_dict(model);
      for (auto& item : before.entries) rank.check_identical(after.find(item.key())->value, item.value().value, "untouched: " + item.key());
    });
}

TEST_CASE("a clone trains, and its original too", "[runtime][clone]") {
  on_odd_cases([](Rank& rank, const OddCase& odd) {
    auto model = plain_odd(), plain = plain_odd();
    auto root = shard_odd(model, rank, odd);
    auto step = [&](Odd& net, int number) {
      net->eval();
      torch::optim::SGD sgd(net->parameters(), 0.1);
      Inputs in(0, number);
      auto loss = net->loss(in);
      loss.backward();
      sgd.step();
      sgd.zero_grad();
      return loss.detach();
    };
    auto plain_copy = plain_odd();
    auto plain_step = [&](int number) {
      plain_copy->eval();
      Inputs in(0, number);
      auto loss = plain_copy->loss(in);
      loss.backward();
      torch::optim::SGD sgd(plain_copy->parameters(), 0.1);  // twice the tied weight, as the sharded ones
      sgd.step();
      sgd.zero_grad();
      return loss.detach();
    };
    rank.check_close(step(model, 0), plain_step(0), odd.name + ": the original's first step");
    auto copy = clone_odd(model);
    for (int number = 1; number < 3; ++number) {
      auto expected = plain_step(number);
      rank.check_close(step(copy, number), expected, odd.name + ": the copy", 1e-4);
      rank.check_close(step(model, number), expected, odd.name + ": the original", 1e-4);
    }
  });
}

TEST_CASE("EMA over sharded parameters equals the plain averaged model", "[runtime][clone]") {
  on_odd_cases([](Rank& rank, const OddCase& odd) {
    auto plain = plain_odd(), plain_ema = plain_odd(), model = plain_odd();
    shard_odd(model, rank, odd);
    auto ema = clone_odd(model);
    ema->eval();
    model->eval();
    for (auto* net : {&plain, &plain_ema}) (*net)->eval();
    auto update = [](Odd& averaged, Odd& trained) {
      at::NoGradGuard no_grad;
      auto to = unique_parameters(*averaged), from = unique_parameters(*trained);
      for (size_t i = 0; i < to.size(); ++i)
        if (to[i].second.is_floating_point()) to[i].second.mul_(0.9).add_(from[i].second, 0.1);
    };
    auto train = [](Odd& net, int step) {
      std::vector<Tensor> all;
      for (auto& [name, parameter] : unique_parameters(*net)) all.push_back(parameter);
      torch::optim::SGD sgd(all, 0.1);
      Inputs in(0, step);
      net->loss(in).backward();
      sgd.step();
      sgd.zero_grad();
    };
    for (int step = 0; step < 3; ++step) {
      train(plain, step);
      train(model, step);
      update(plain_ema, plain);
      update(ema, model);
      at::NoGradGuard no_grad;
      Inputs in(0, 50 + step), again(0, 50 + step);
      rank.check_close(ema->loss(in), plain_ema->loss(again), fmt::format("{}, step {}", odd.name, step), 1e-4);
    }
  });
}

TEST_CASE("units, sequences and recurrent modules clone", "[runtime][clone]") {
  on_ranks(2, [](Rank& rank) {
    auto net = seeded(5, [] { return nn::Sequential(nn::Linear(5, 6), nn::Tanh(), nn::Linear(6, 3)); });
    for (auto index : {0, 2}) fully_shard(*net->ptr(index), {.mesh = rank.mesh()});
    fully_shard(net, {.mesh = rank.mesh()});
    auto copy = seeded(3, [&] { return std::dynamic_pointer_cast<nn::SequentialImpl>(clone(net)); });
    check_equal_state(rank, *copy, *net, "sequential");
    at::NoGradGuard no_grad;
    auto x = torch::ones({2, 5});
    rank.check_identical(copy->forward(x), net->forward(x), "sequential");
    auto unit = seeded(3, [&] { return clone(*net->ptr(0)); });
    rank.check(find_fsdp_module(*unit)->is_root(), "a unit's copy is a root");
    check_equal_state(rank, *unit, *net->ptr(0), "unit");
    auto lstm = seeded(5, [] { return nn::LSTM(nn::LSTMOptions(5, 3).num_layers(2)); });
    fully_shard(lstm, {.mesh = rank.mesh()});
    nn::LSTM copied(seeded(3, [&] { return clone(lstm); }));
    auto sequence = torch::ones({4, 2, 5});
    rank.check_identical(std::get<0>(copied->forward(sequence)), std::get<0>(lstm->forward(sequence)), "lstm");
  });
}

TEST_CASE("a module without sharded parameters is cloned by LibTorch", "[runtime][clone]") {
  auto plain = plain_odd();
  Odd copy(seeded(3, [&] { return clone(plain); }));
  CHECK(at::equal(copy->lin->weight, plain->lin->weight));
  CHECK(!find_fsdp_module(*copy));
}

/// Two names for one tensor in members that nobody but the class knows.
struct OwnTieImpl : nn::Cloneable<OwnTieImpl> {
  OwnTieImpl() {
    reset();
    tie();
  }
  void reset() override {
    a = register_parameter("a", torch::randn({3, 3}));
    b = register_parameter("b", torch::randn({3, 3}));
  }
  void tie() {
    b = a;
    parameters_["b"] = a;
  }
  Tensor a, b;
};
TORCH_MODULE(OwnTie);

TEST_CASE("what cannot be cloned is refused, and the original is as it was", "[runtime][clone]") {
  on_ranks(2, [](Rank& rank) {
    auto chain = plain_chain(1);
    fully_shard(chain, {.mesh = rank.mesh()});
    auto before = chain->parameters();
    rank.check_throws<UsageError>([&] { clone(chain); }, {"Chain", "Cloneable", "reset()"}, "not Cloneable");
    for (size_t i = 0; i < before.size(); ++i) rank.check(chain->parameters()[i].is_same(before[i]), "as it was");

    auto model = plain_odd();
    shard_odd(model, rank, {});
    rank.check_throws<UsageError>([&] { seeded(3, [&] { return clone(model->norm); }); }, {"weight", "around"}, "a part of a group");

    OwnTie own;
    fully_shard(own, {.mesh = rank.mesh()});
    rank.check_throws<UsageError>([&] { seeded(3, [&] { return clone(own); }); }, {"'a' and 'b'", "prepare"}, "a tie that is lost");
    auto retie = [](nn::Module& copy) { copy.as<OwnTieImpl>()->tie(); };
    OwnTie tied(seeded(3, [&] { return clone(own, {.prepare = retie}); }));
    rank.check(tied->a.is_same(tied->b), "tied by the caller");
    check_equal_state(rank, *tied, *own, "own tie");

    FullParameters scope(model);
    rank.check_throws<StateError>([&] { clone(model); }, {"full parameters"}, "while shown");
  });
}

/// LibTorch's own clone(). A collective call, which draws random numbers that nobody needs: first all ranks are to have made
/// what is seeded, out of the same generator.
template <class Module>
std::shared_ptr<Module> libtorch_clone(const Rank& rank, Module& module) {
  rank.world()->start_all_reduce(torch::zeros({1}), ReduceOp::kSum, "all have made their models")->wait();
  return std::dynamic_pointer_cast<Module>(module.clone());
}

TEST_CASE("LibTorch's clone() of a sharded module is an ordinary module with the whole values", "[runtime][clone]") {
  for (const int ranks : {1, 2, 3})
    for (const auto layout : {ParamLayout::kPerParameter, ParamLayout::kFlat})
      on_ranks(ranks, [&](Rank& rank) {
        const auto make = [] { return seeded(5, [] { return nn::Sequential(nn::Linear(4, 6), nn::Linear(6, 3)); }); };
        auto model = make(), plain = make();
        fully_shard(*model->ptr(0), {.mesh = rank.mesh(), .layout = layout});
        fully_shard(model, {.mesh = rank.mesh(), .layout = layout});
        auto copy = libtorch_clone(rank, *model), plain_copy = libtorch_clone(rank, *plain);
        const auto members = [](nn::SequentialImpl& net) { return net.ptr(0)->as<nn::Linear>()->weight; };
        rank.check(!find_fsdp_module(*copy), "not sharded");
        torch::optim::AdamW ours(copy->parameters(), 1e-2), theirs(plain_copy->parameters(), 1e-2);
        for (int step = 0; step < 3; ++step) {
          for (auto* net : {copy.get(), plain_copy.get()}) {
            net->zero_grad();
            net->forward(Inputs(0, step).normal({3, 4})).square().mean().backward();
          }
          ours.step();
          theirs.step();
          for (size_t i = 0; i < copy->parameters().size(); ++i) {
            const auto found = copy->parameters()[i], expected = plain_copy->parameters()[i];
            rank.check(!is_dtensor(found) && !is_fsdp_parameter(found) && found.is_contiguous(), "an ordinary tensor");
            rank.check_equal(found.sizes().vec(), expected.sizes().vec(), "sizes");
            rank.check_close(found.grad(), expected.grad(), fmt::format("step {}: gradient {}", step, i));
            rank.check_close(found.detach(), expected.detach(), fmt::format("step {}: values {}", step, i));
          }
        }
        rank.check(members(*copy).const_data_ptr() == copy->parameters()[0].const_data_ptr(), "members are the parameters");
        for (size_t i = 0; i < plain->parameters().size(); ++i)
          rank.check_identical(full_tensor(model->parameters()[i]), plain->parameters()[i].detach(), "the original is untouched");
      });
}

TEST_CASE("LibTorch's clone() computes without autograd, and an embedding looks up what it should", "[runtime][clone]") {
  on_ranks(2, [](Rank& rank) {
    const auto make = [] { return seeded(5, [] { return nn::Sequential(nn::Embedding(6, 4), nn::Linear(4, 6)); }); };
    auto model = make(), plain = make();
    fully_shard(model, {.mesh = rank.mesh()});
    auto copy = libtorch_clone(rank, *model);
    at::NoGradGuard no_grad;
    const auto tokens = torch::tensor({0, 5, 2});
    rank.check_identical(copy->forward(tokens), plain->forward(tokens), "forward");
  });
}

TEST_CASE("a copy of a sharded parameter is a DTensor of its own", "[runtime][clone]") {
  for (int ranks : {1, 2})
    on_ranks(ranks, [](Rank& rank) {
      auto model = plain_chain(1);
      fully_shard(model, {.mesh = rank.mesh()});
      at::NoGradGuard no_grad;
      for (auto& parameter : model->parameters()) {
        auto copy = parameter.clone();
        rank.check(is_dtensor(copy) && !is_fsdp_parameter(copy), "no parameter");
        rank.check(!to_local(copy).is_alias_of(to_local(parameter)) || to_local(copy).numel() == 0, "memory of its own");
        const auto whole = full_tensor(parameter);
        rank.check_identical(full_tensor(copy), whole, "values");
        rank.check_identical(copy.mul(2).t().contiguous(), (whole * 2).t().contiguous(), "arithmetic");
        copy.set_requires_grad(true);
        at::AutoGradMode grad(true);
        copy.square().sum().backward();
        rank.check_close(copy.grad(), 2 * parameter.detach(), "autograd");
        rank.check_equal(copy.grad().sizes().vec(), whole.sizes().vec(), "the gradient's sizes");
        rank.check_throws<Error>([&] { parameter.detach().clone().resize_({100}); }, {"resize_", "copy_"}, "resize");
      }
    });
}

}  // namespace
}  // namespace fsdp::test
