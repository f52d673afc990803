#include <catch2/catch.hpp>

#include "support/models.hpp"

// fsdp::to: another dtype or device for a module that is sharded already.

namespace fsdp::test {
namespace {

namespace nn = torch::nn;
using at::Tensor;

struct TiedImpl : nn::Module {
  explicit TiedImpl(const Tensor& other) { weight = register_parameter("weight", other); }
  Tensor forward(const Tensor& x) { return nn::functional::linear(x, weight); }
  Tensor weight;
};
TORCH_MODULE(Tied);

/// Tied, frozen, strided, 0-dim and integer states, with buffers.
struct MixedImpl : nn::Module {
  MixedImpl() {
    conv = register_module("conv", nn::Conv2d(3, 5, 2));
    norm = register_module("norm", nn::BatchNorm2d(5));
    first = register_module("first", nn::Linear(5, 5));
    second = register_module("second", Tied(first->weight));
    scale = register_parameter("scale", torch::rand({}));
    steps = register_parameter("steps", torch::arange(3), /*requires_grad=*/false);
    conv->weight.set_data(conv->weight.contiguous(at::MemoryFormat::ChannelsLast));
    first->bias.set_requires_grad(false);
  }
  Tensor forward(const Tensor& x) {
    const auto features = norm->forward(conv->forward(x)).mean({2, 3});
    return second->forward(torch::tanh(first->forward(features))) * scale + steps.sum();
  }
  nn::Conv2d conv{nullptr};
  nn::BatchNorm2d norm{nullptr};
  nn::Linear first{nullptr};
  Tied second{nullptr};
  Tensor scale, steps;
};
TORCH_MODULE(Mixed);

Mixed mixed() {
  return seeded(3, [] { return Mixed(); });
}

Tensor mixed_loss(Mixed model, int rank, int step, at::ScalarType dtype) {
  Inputs inputs(rank, step);
  return model->forward(inputs.normal({2, 3, 4, 4}).to(dtype)).square().mean();
}

/// The plain model's averaged gradients, from batches that see the same running statistics.
NamedTensors mixed_gradients(Mixed plain, int ranks, int step, at::ScalarType dtype) {
  plain->zero_grad();
  for (int rank = 0; rank < ranks; ++rank) mixed_loss(plain, rank, step, dtype).backward();
  NamedTensors gradients;
  for (auto& [name, parameter] : unique_parameters(*plain)) {
    if (parameter.grad().defined()) parameter.mutable_grad() = parameter.grad() / ranks;
    gradients.emplace_back(name, parameter.grad());
  }
  return gradients;
}

void check_states(const Rank& rank, const nn::Module& module, const nn::Module& plain, const std::string& what,
                  double relative = 1e-5) {
  const auto found = unique_parameters(module), expected = unique_parameters(plain);
  rank.check_equal(found.size(), expected.size(), what);
  for (size_t i = 0; i < found.size(); ++i) {
    const auto& [name, parameter] = found[i];
    rank.check_equal(name, expected[i].first, what);
    rank.check(parameter.scalar_type() == expected[i].second.scalar_type(), what + ": dtype of " + name);
    rank.check(fsdp::unsharded(parameter).scalar_type() == expected[i].second.scalar_type(), what + ": the member's of " + name);
    rank.check_equal(parameter.requires_grad(), expected[i].second.requires_grad(), what + ": requires_grad of " + name);
    rank.check_close(dtensor_of(parameter).full_tensor().detach(), expected[i].second.detach(), what + ": " + name, relative);
    const auto gradient = grad_dtensor_of(parameter);
    rank.check_close(gradient.defined() ? gradient.full_tensor() : Tensor(), expected[i].second.grad(), what + ": gradient of " + name, relative);
  }
}

/// With state: momenta stay in the dtype that they began with.
std::unique_ptr<torch::optim::Optimizer> optimizer_of(const nn::Module& module, int ranks) {
  if (ranks % 2 == 1) return make_optimizer(module, {});
  std::vector<Tensor> unique;  // parameters() has the plain model's tied one twice
  for (auto& [name, parameter] : unique_parameters(module)) unique.push_back(parameter);
  return std::make_unique<torch::optim::SGD>(unique, torch::optim::SGDOptions(0.05).momentum(0.9));
}

/// A float step, a conversion, steps in the other dtype: like the plain model under LibTorch's own to().
void check_training(Rank& rank, const FullyShardOptions& options, bool has_inner_groups) {
  auto model = mixed(), plain = mixed();
  if (has_inner_groups) {
    fully_shard(model->conv, options);
    fully_shard(model->norm, options);
  }
  fully_shard(model, options);
  const auto optimizer = optimizer_of(*model, rank.size()), plain_optimizer = optimizer_of(*plain, rank.size());
  const auto registered = model->parameters();
  const auto member = model->conv->weight;
  auto dtype = at::kFloat;
  for (int step = 0; step < 4; ++step) {
    if (step == 1 || step == 3) {
      dtype = dtype == at::kFloat ? at::kDouble : at::kFloat;
      rank.log().clear();
      to(model, dtype);
      rank.check(rank.calls().empty(), "nothing is communicated");
      for (auto& [name, parameter] : unique_parameters(*plain))
        if (parameter.is_floating_point()) {
          const auto gradient = parameter.grad();
          parameter.mutable_grad().reset();
          parameter.set_data(parameter.detach().to(dtype));
          if (gradient.defined()) parameter.mutable_grad() = gradient.to(dtype);
        }
      for (auto& buffer : plain->buffers())
        if (buffer.is_floating_point()) buffer.set_data(buffer.to(dtype));
      check_states(rank, *model, *plain, fmt::format("converted before step {}", step));
      for (size_t i = 0; i < registered.size(); ++i)
        rank.check(model->parameters()[i].is_same(registered[i]), "the optimizer's tensors");
      rank.check(member.is_same(model->conv->weight), "the member");
      rank.check(model->second->weight.is_same(model->first->weight), "tied members");
      rank.check_equal(member.is_contiguous(at::MemoryFormat::ChannelsLast), true, "its strides");
      rank.check(model->norm->running_mean.scalar_type() == dtype, "a buffer");
      rank.check(model->norm->num_batches_tracked.scalar_type() == at::kLong, "an integer buffer");
    }
    mixed_gradients(plain, rank.size(), step, dtype);
    optimizer->zero_grad();
    mixed_loss(model, rank.index(), step, dtype).backward();
    check_states(rank, *model, *plain, fmt::format("after backward {}", step));
    optimizer->step();
    plain_optimizer->step();
  }
}

TEST_CASE("a converted module trains on like the plain one, with the optimizer it had", "[runtime][conversion]") {
  for (int world_size : {1, 2, 3, 5, 8})
    on_ranks(world_size, [&](Rank& rank) { check_training(rank, {.mesh = rank.mesh()}, world_size % 2 == 1); });
  on_ranks(4, [](Rank& rank) { check_training(rank, {.mesh = rank.hybrid(2, 2)}, true); });
  on_ranks(2, [](Rank& rank) { check_training(rank, {.mesh = rank.mesh(), .replicate_only = true}, false); });
  on_ranks(4, [](Rank& rank) { check_training(rank, {.mesh = rank.mesh(), .reshard_after_forward = 2}, false); });
  on_ranks(2, [](Rank& rank) { check_training(rank, {.mesh = rank.mesh(), .reshard_after_forward = false}, true); });
}

TEST_CASE("gradients that wait for a reduction are converted too", "[runtime][conversion]") {
  for (bool hybrid : {false, true})
    on_ranks(4, [hybrid](Rank& rank) {
      const auto mesh = hybrid ? rank.hybrid(2, 2) : rank.mesh();
      auto model = plain_chain(), plain = plain_chain();
      auto root = fully_shard(model, {.mesh = mesh});
      const auto loss = [&](Chain& chain, int index, int step) {
        Inputs inputs(index, step);
        return chain->forward(inputs.normal({4, 6}).to(chain->head->weight.scalar_type())).square().mean();
      };
      if (hybrid)
        root.set_requires_all_reduce(false);
      else
        root.set_requires_gradient_sync(false);
      loss(model, rank.index(), 0).backward();
      to_double(*model);
      root.set_requires_all_reduce(true);
      root.set_requires_gradient_sync(true);
      loss(model, rank.index(), 1).backward();
      plain->to(at::kDouble);
      for (int step : {0, 1})
        for (int index = 0; index < 4; ++index) (loss(plain, index, step) / 4).backward();
      for (auto& [name, parameter] : unique_parameters(*model)) {
        rank.check(parameter.grad().scalar_type() == at::kDouble, name + ": its gradient's dtype");
        rank.check_close(grad_dtensor_of(parameter).full_tensor(), plain->named_parameters()[name].grad(), name);
      }
    });
}

TEST_CASE("a policy's dtypes stay, the dtype that is kept changes", "[runtime][conversion]") {
  on_ranks(2, [](Rank& rank) {
    auto model = mixed();
    auto root = fully_shard(model, {.mesh = rank.mesh(), .mp_policy = {.param_dtype = at::kBFloat16}});
    to(model, at::kDouble);
    const auto named = model->named_parameters();
    rank.check(named["first.weight"].scalar_type() == at::kDouble, "the sharded parameter");
    rank.check(model->first->weight.scalar_type() == at::kBFloat16, "the unsharded parameter keeps param_dtype");
    rank.check(model->norm->weight.scalar_type() == at::kDouble, "an exempt module's unsharded parameter follows");
    rank.check(named["steps"].scalar_type() == at::kLong, "integers stay");
    rank.check(model->norm->running_mean.scalar_type() == at::kDouble, "so do its buffers");
    nn::BatchNorm1d norm(3);
    fully_shard(norm, {.mesh = rank.mesh(), .mp_policy = {.buffer_dtype = at::kFloat}});
    to(norm, at::kDouble);
    rank.check(norm->running_mean.scalar_type() == at::kFloat, "buffer_dtype stays");
    rank.check(saved_dtype(*norm, norm->running_mean) == at::kDouble, "what it is saved in changes");
    rank.check(saved_dtype(*norm, norm->num_batches_tracked) == at::kLong, "a buffer that is not cast");
    rank.check_equal(parameter_bytes(root).unsharded, int64_t{0}, "nothing is gathered");
    to_bfloat16(*model);
    rank.check(named["first.weight"].scalar_type() == at::kBFloat16, "no cast is left");
    mixed_loss(model, rank.index(), 0, at::kBFloat16).backward();
    rank.check(named["first.weight"].grad().scalar_type() == at::kBFloat16, "gradients follow");
    to_float(*model);
    rank.check(named["first.weight"].grad().scalar_type() == at::kFloat, "and are converted");
    mixed_loss(model, rank.index(), 0, at::kFloat).backward();
  });
  on_ranks(1, [](Rank& rank) {
    // At one rank a cast decides whether memory is ever released.
    nn::Linear model(4, 4);
    auto root = fully_shard(model, {.mesh = rank.mesh(), .mp_policy = {.param_dtype = at::kBFloat16}});
    const auto x = torch::ones({1, 4});
    for (auto dtype : {at::kBFloat16, at::kFloat, at::kBFloat16, at::kDouble}) {
      to(model, dtype);
      const auto y = model->forward(x);
      y.sum().backward();
      rank.check(y.scalar_type() == at::kBFloat16, "computed in param_dtype");
      rank.check(model->parameters()[0].grad().scalar_type() == dtype, "kept in its own");
      rank.check_equal(parameter_bytes(root).unsharded, int64_t{0}, "released");
      model->zero_grad();
    }
  });
}

TEST_CASE("a module goes to the meta device and back, losing its values", "[runtime][conversion]") {
  for (int world_size : {1, 3})
    on_ranks(world_size, [](Rank& rank) {
      auto model = plain_chain();
      for (auto& layer : model->layers) fully_shard(layer, {.mesh = rank.mesh()});
      fully_shard(model, {.mesh = rank.mesh()});
      const auto registered = model->parameters();
      model->forward(torch::ones({1, 6})).sum().backward();
      to(model, at::kMeta);
      for (auto& parameter : registered) rank.check(parameter.is_meta() && !parameter.grad().defined(), "on meta");
      rank.check(model->head->weight.is_meta(), "members too");
      rank.check_throws<StateError>([&] { model->forward(torch::ones({1, 6})); }, {"fsdp::materialize"}, "no values");
      rank.check_throws<UsageError>([&] { to(model, at::kCPU); }, {"meta", "fsdp::materialize"}, "nothing to move");
      to(model, at::kDouble);
      materialize(model, {.seed = 6});
      auto plain = plain_chain();
      plain->to(at::kDouble);
      init_parameters(plain, {.seed = 6});
      for (auto& [name, parameter] : unique_parameters(*model))
        rank.check_identical(dtensor_of(parameter).full_tensor().detach(), plain->named_parameters()[name].detach(), name);
      const auto x = torch::ones({2, 6}, at::kDouble);
      rank.check_close(model->forward(x), plain->forward(x), "forward");
      model->forward(x).sum().backward();
      for (size_t i = 0; i < registered.size(); ++i)
        rank.check(registered[i].is_same(model->parameters()[i]) && registered[i].grad().defined(), "the same tensors train");
    });
}

TEST_CASE("a gather under way is given up and kept parameters are released", "[runtime][conversion]") {
  on_ranks(2, [](Rank& rank) {
    ShardedChain chain(rank.mesh());
    auto plain = plain_chain();
    const auto x = torch::ones({2, 6}, at::kDouble);
    chain.layers[0].unshard();
    auto pending = chain.layers[1].unshard_async();
    to(chain.model, at::kDouble);
    pending.wait();
    rank.check_equal(parameter_bytes(chain.root[0]).unsharded, int64_t{0}, "nothing is left");
    plain->to(at::kDouble);
    rank.check_close(chain.model->forward(x), plain->forward(x), "forward");
  });
}

TEST_CASE("inside a step a conversion is an error and changes nothing", "[runtime][conversion]") {
  on_ranks(2, [](Rank& rank) {
    ShardedChain chain(rank.mesh());
    const auto refused = [&](const std::string& what) {
      rank.check_throws<StateError>([&] { to(chain.model, at::kDouble); }, {"in the middle of a step"}, what);
      for (auto& parameter : chain.model->parameters()) rank.check(parameter.scalar_type() == at::kFloat, what);
    };
    {
      auto loss = chain.loss(rank.index(), 0);
      refused("between forward and backward");
      loss.backward();
    }
    {
      at::NoGradGuard no_grad;
      ForwardScope scope(chain.root[0]);
      refused("in a scope");
    }
    chain.model->layers[0]->weight.register_hook([&](const Tensor& gradient) {
      if (rank.index() == 0) refused("in backward");
      return gradient;
    });
    chain.step(rank.index());
    chain.root[0].set_is_last_backward(false);
    chain.step(rank.index());
    refused("with reductions under way");
    chain.root[0].set_is_last_backward(true);
    chain.step(rank.index());
    to(chain.model, at::kDouble);
  });
}

TEST_CASE("LibTorch's own to() is named at the next use, and fsdp::to repairs what it did", "[runtime][conversion]") {
  for (int world_size : {1, 2})
    on_ranks(world_size, [](Rank& rank) {
      ShardedChain chain(rank.mesh());
      auto plain = plain_chain();
      const auto x = torch::ones({2, 6});
      chain.step(rank.index());
      const auto convert_and_use = [&] {
        chain.model->to(at::kDouble);  // where it reads a second parameter of the group, that is a use
        chain.model->forward(x);
      };
      rank.check_throws<StateError>(convert_and_use, {".weight", "Float", "Double", "fsdp::to"}, "the next use");
      chain.root[0].reset_iter_state();
      to(chain.model, at::kDouble);
      plain->to(at::kDouble);
      rank.check_close(chain.model->forward(x.to(at::kDouble)), plain->forward(x.to(at::kDouble)), "after fsdp::to");
      chain.model->forward(x.to(at::kDouble)).sum().backward();
    });
}

TEST_CASE("LibTorch's own to() with nothing to convert is none", "[runtime][conversion]") {
  for (int world_size : {1, 2})
    on_ranks(world_size, [](Rank& rank) {
      ShardedChain chain(rank.mesh());
      auto plain = plain_chain();
      const auto x = torch::ones({2, 6});
      for (int step = 0; step < 2; ++step) {
        const auto registered = chain.model->parameters();
        rank.log().clear();
        chain.model->to(at::kCPU);
        chain.model->to(at::kFloat);
        {
          at::NoGradGuard no_grad;
          chain.model->to(at::kCPU, at::kFloat);
        }
        rank.check(rank.calls().empty(), "nothing is communicated");
        for (size_t i = 0; i < registered.size(); ++i) {
          const auto parameter = chain.model->parameters()[i];
          rank.check(parameter.is_same(registered[i]) && is_fsdp_parameter(parameter), "still the parameters");
          rank.check_close(full_tensor(parameter), plain->parameters()[i].detach(), "a value");
        }
        to(chain.model, at::kFloat);  // throws in a step
        rank.check_close(chain.model->forward(x), plain->forward(x), "the next forward");
        chain.model->forward(x).sum().backward();
        chain.model->zero_grad();
      }
    });
}

TEST_CASE("a part of a group, a dtype or a device that does not fit are refused", "[runtime][conversion]") {
  on_ranks(2, [](Rank& rank) {
    ShardedChain chain(rank.mesh());
    auto& model = chain.model;
    rank.check_throws<UsageError>([&] { to(model->head, at::kDouble); }, {"head.weight", "root"}, "a part of the root's group");
    rank.check_throws<UsageError>([&] { to(model, at::kLong); }, {"floating-point", "Long"}, "an integer dtype");
    rank.check_throws<UsageError>([&] { to_cuda(*model, 1); }, {"cpu", "cuda:1"}, "another device than the mesh's");
    for (auto& parameter : model->parameters()) rank.check(parameter.scalar_type() == at::kFloat, "unchanged");
    auto pair = plain_chain(2);
    fully_shard({pair->layers[0].ptr(), pair->layers[1].ptr()}, {.mesh = rank.mesh()});
    rank.check_throws<UsageError>([&] { to(pair->layers[0], at::kDouble); }, {"in one group with"}, "one of two modules that share a group");
    to(model->layers[1], at::kDouble);
    rank.check(model->layers[1]->weight.scalar_type() == at::kDouble && model->layers[0]->weight.scalar_type() == at::kFloat,
               "one whole group");
    to_cpu(*model);
  });
}

TEST_CASE("what is not sharded is converted too, and a toggle that nobody has seen survives", "[runtime][conversion]") {
  on_ranks(2, [](Rank& rank) {
    auto model = plain_chain(2);
    const auto ignored = model->layers[0]->weight;
    fully_shard(model, {.mesh = rank.mesh(), .ignored_params = {ignored}});
    ignored.mutable_grad() = torch::ones_like(ignored);
    model->named_parameters()["layer1.weight"].set_requires_grad(false);
    to(model, at::kDouble);
    rank.check(ignored.scalar_type() == at::kDouble && ignored.grad().scalar_type() == at::kDouble, "an ignored parameter");
    rank.check(!model->named_parameters()["layer1.weight"].requires_grad() && !model->layers[1]->weight.requires_grad(), "frozen on both sides");
    model->forward(torch::ones({1, 6}, at::kDouble)).sum().backward();
    rank.check(!model->named_parameters()["layer1.weight"].grad().defined(), "no gradient");
  });
}

TEST_CASE("what saw the old memory is an error with a name, not garbage", "[runtime][conversion]") {
  for (int world_size : {1, 2})
    on_ranks(world_size, [](Rank& rank) {
      nn::Linear model(4, 4);
      fully_shard(model, {.mesh = rank.mesh()});
      const auto view = model->weight.detach().narrow(0, 0, 2);
      auto loss = model->forward(torch::ones({2, 4}, torch::requires_grad())).square().sum();
      loss.backward({}, /*retain_graph=*/true);
      to(model, at::kDouble);
      rank.check_throws<std::exception>([&] { view.sum(); }, {"weight", "another dtype or device"}, "a view");
      rank.check_throws<std::exception>([&] { loss.backward(); }, {}, "a graph that was kept");
      find_fsdp_module(*model)->reset_iter_state();
      model->forward(torch::ones({2, 4}, at::kDouble)).sum().backward();
      rank.check(model->parameters()[0].grad().defined(), "a new step");
    });
}

}  // namespace
}  // namespace fsdp::test
