#include <catch2/catch.hpp>

#include <torch/csrc/autograd/utils/lambda_post_hook.h>

#include <cmath>
#include <functional>
#include <set>
#include <sstream>
#include <unordered_map>

#include "support/ranks.hpp"

// Whole programs as plain LibTorch's users write them: with the fully_shard lines they compute what they compute without.

namespace fsdp::test::plain_programs {
namespace {

namespace F = torch::nn::functional;
using at::Tensor;

/// What a program calls on a module it has built: nothing in the plain run, fully_shard in the others.
using Shard = std::function<void(torch::nn::Module&)>;

/// What a program has to show for itself, as whole tensors.
struct Results {
  void add(const std::string& name, const Tensor& tensor) {
    all.emplace_back(name, (is_dtensor(tensor) ? full_tensor(tensor) : tensor).detach().clone());
  }
  void add(const std::string& name, double number) { add(name, torch::tensor(number, at::kDouble)); }
  void add(const std::string& name, const torch::nn::Module& module) {
    for (const auto& parameter : module.named_parameters()) add(name + "." + parameter.key(), parameter.value());
  }
  std::vector<std::pair<std::string, Tensor>> all;
};
using Program = Results (*)(const Shard&);

void computes_the_same_sharded(Program program) {
  const auto plain = program([](torch::nn::Module&) {});
  for (const auto& [name, tensor] : plain.all) {
    INFO(name);
    CHECK(at::isfinite(tensor).all().item<bool>());
  }
  for (const int world_size : {1, 2, 3})
    on_ranks(world_size, [&](Rank& rank) {
      const auto found = program([&](torch::nn::Module& module) {
        std::vector<std::shared_ptr<torch::nn::Module>> children;
        for (const auto& child : module.children())
          if (!child->parameters().empty()) children.push_back(child);
        for (size_t i = 0; i + 1 < children.size(); ++i) fully_shard(*children[i], {.mesh = rank.mesh()});
        fully_shard(module, {.mesh = rank.mesh()});  // the last child is the root's
        for (const auto& parameter : module.parameters()) rank.check(is_dtensor(parameter), "the run is sharded");
      });
      rank.check_equal(found.all.size(), plain.all.size(), "number of results");
      for (size_t i = 0; i < std::min(found.all.size(), plain.all.size()); ++i) {
        rank.check_equal(found.all[i].first, plain.all[i].first, "name of a result");
        rank.check_close(found.all[i].second, plain.all[i].second,
                         fmt::format("{} ({} of {})", plain.all[i].first, i, plain.all.size()));
      }
    });
}

// Doubles: sums in another order then stay far below what is compared, whatever Adam and LBFGS make of them.
constexpr auto kDtype = at::kDouble;

torch::nn::Sequential make_net(uint64_t seed = 7, int64_t in = 4, int64_t hidden = 7, int64_t out = 2) {
  torch::nn::Sequential net = seeded(seed, [&] {
    return torch::nn::Sequential(torch::nn::Linear(in, hidden), torch::nn::Tanh(), torch::nn::Linear(hidden, 5),
                                 torch::nn::Tanh(), torch::nn::Linear(5, out));
  });
  net->to(kDtype);
  return net;
}

Tensor inputs(int step, int64_t rows = 8, int64_t columns = 4) {
  return torch::sin(torch::arange(rows * columns, kDtype).view({rows, columns}) * 0.7 + step);
}
Tensor targets(int step) { return torch::cos(torch::arange(16, kDtype).view({8, 2}) * 0.3 + step); }

Tensor fit_loss(torch::nn::Sequential& net, int step) { return F::mse_loss(net->forward(inputs(step)), targets(step)); }

template <class Optimizer>
Results fit(torch::nn::Sequential& net, Optimizer& optimizer, int steps) {
  Results results;
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    auto loss = fit_loss(net, step);
    loss.backward();
    optimizer.step();
    results.add("loss", loss);
  }
  return results;
}

Results fit_by_lbfgs(const Shard& shard) {
  auto net = make_net();
  shard(*net);
  torch::optim::LBFGS optimizer(
      net->parameters(), torch::optim::LBFGSOptions(0.5).max_iter(6).history_size(4).line_search_fn("strong_wolfe"));
  Results results;
  for (int epoch = 0; epoch < 2; ++epoch)
    results.add("loss", optimizer.step([&] {
      optimizer.zero_grad();
      auto loss = fit_loss(net, 0);
      loss.backward();
      return loss;
    }));
  results.add("loss in the end", fit_loss(net, 0));
  results.add("net", *net);
  return results;
}

TEST_CASE("a fit by LBFGS finds sharded what it finds plain", "[runtime][plain_programs]") {
  computes_the_same_sharded(fit_by_lbfgs);
}

Results train_gan(const Shard& shard) {
  auto generator = make_net(11, 3, 7, 4), discriminator = make_net(12, 4, 6, 1);
  shard(*generator);
  shard(*discriminator);
  torch::optim::Adam generator_optimizer(generator->parameters(), torch::optim::AdamOptions(0.01).betas({0.5, 0.9}));
  torch::optim::Adam discriminator_optimizer(discriminator->parameters(),
                                             torch::optim::AdamOptions(0.02).betas({0.5, 0.9}));
  const auto ones = torch::ones({8, 1}, kDtype), zeros = torch::zeros({8, 1}, kDtype);
  Results results;
  for (int step = 0; step < 3; ++step) {
    const auto noise = inputs(step, 8, 3);
    discriminator->zero_grad();
    auto on_real = F::binary_cross_entropy_with_logits(discriminator->forward(inputs(10 + step)), ones);
    auto on_fake =
        F::binary_cross_entropy_with_logits(discriminator->forward(generator->forward(noise).detach()), zeros);
    (on_real + on_fake).backward();
    discriminator_optimizer.step();

    for (auto& parameter : discriminator->parameters()) parameter.requires_grad_(false);
    generator->zero_grad();
    auto fooled = F::binary_cross_entropy_with_logits(discriminator->forward(generator->forward(noise)), ones);
    fooled.backward();
    generator_optimizer.step();
    for (auto& parameter : discriminator->parameters()) parameter.requires_grad_(true);

    results.add("discriminator's loss", on_real + on_fake);
    results.add("generator's loss", fooled);
  }
  results.add("generator", *generator);
  results.add("discriminator", *discriminator);
  return results;
}

TEST_CASE("a GAN that freezes and thaws its discriminator trains sharded as it trains plain",
          "[runtime][plain_programs]") {
  computes_the_same_sharded(train_gan);
}

Results clip_in_a_loop(const Shard& shard) {
  auto net = make_net();
  shard(*net);
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.2).momentum(0.9));
  Results results;
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    auto loss = fit_loss(net, step);
    loss.backward();
    double squares = 0;
    int64_t count = 0;
    for (auto& parameter : net->parameters()) {
      if (!parameter.grad().defined()) continue;
      squares += std::pow(parameter.grad().norm().item<double>(), 2);
      count += parameter.numel();
    }
    const double norm = std::sqrt(squares), limit = 0.1;
    if (norm > limit)
      for (auto& parameter : net->parameters()) parameter.grad().mul_(limit / norm);
    optimizer.step();
    results.add("loss", loss);
    results.add("norm", norm);
    results.add("root mean square", std::sqrt(squares / static_cast<double>(count)));
    results.add("count", static_cast<double>(count));
  }
  results.add("net", *net);
  return results;
}

TEST_CASE("a clipping loop of one's own over grad() and numel() clips by the whole norm", "[runtime][plain_programs]") {
  computes_the_same_sharded(clip_in_a_loop);
}

Results decay_groups(const Shard& shard) {
  auto net = make_net();
  shard(*net);
  std::vector<Tensor> decayed, others;
  for (auto& parameter : net->parameters()) (parameter.dim() >= 2 ? decayed : others).push_back(parameter);
  using torch::optim::AdamWOptions;
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(decayed, std::make_unique<AdamWOptions>(AdamWOptions(0.02).weight_decay(0.5)));
  groups.emplace_back(others, std::make_unique<AdamWOptions>(AdamWOptions(0.02).weight_decay(0)));
  torch::optim::AdamW optimizer(groups, AdamWOptions(0.02));
  Results results;
  results.add("decayed", static_cast<double>(decayed.size()));
  for (int step = 0; step < 4; ++step) {
    optimizer.zero_grad();
    auto loss = fit_loss(net, step);
    loss.backward();
    results.add("norm", torch::nn::utils::clip_grad_norm_(net->parameters(), 0.1));
    optimizer.step();
    for (auto& group : optimizer.param_groups())
      static_cast<AdamWOptions&>(group.options()).lr(0.02 / (step + 2));  // a schedule
    results.add("loss", loss);
  }
  results.add("net", *net);
  return results;
}

TEST_CASE("AdamW with weight decay by dim(), LibTorch's clipping and a schedule trains the same",
          "[runtime][plain_programs]") {
  computes_the_same_sharded(decay_groups);
}

/// Some ranks have no elements of the last bias.
template <class Optimizer, class Options>
Results optimizer_from_before(const Shard& shard, const Options& options) {
  auto net = make_net();
  Optimizer optimizer(net->parameters(), options);
  shard(*net);
  auto results = fit(net, optimizer, 3);
  results.add("net", *net);
  return results;
}

TEST_CASE("an optimizer that was built before the fully_shard lines trains the same", "[runtime][plain_programs]") {
  using namespace torch::optim;
  computes_the_same_sharded([](const Shard& shard) {
    return optimizer_from_before<SGD>(shard, SGDOptions(0.2).momentum(0.9).weight_decay(0.1));
  });
  computes_the_same_sharded([](const Shard& shard) {
    return optimizer_from_before<AdamW>(shard, AdamWOptions(0.02).weight_decay(0.1).amsgrad(true));
  });
  computes_the_same_sharded([](const Shard& shard) {
    return optimizer_from_before<Adagrad>(shard, AdagradOptions(0.1).weight_decay(0.1));
  });
  computes_the_same_sharded([](const Shard& shard) {
    return optimizer_from_before<RMSprop>(shard, RMSpropOptions(0.01).weight_decay(0.1).centered(true).momentum(0.5));
  });
}

Results gradient_penalty(const Shard& shard) {
  auto net = make_net();
  shard(*net);
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1));
  Results results;
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    auto loss = fit_loss(net, step);
    const auto gradients =
        torch::autograd::grad({loss}, net->parameters(), {}, /*retain_graph=*/true, /*create_graph=*/true);
    auto penalty = torch::zeros({}, kDtype);
    for (const auto& gradient : gradients) penalty = penalty + gradient.square().sum();
    (loss + 0.5 * penalty).backward();
    optimizer.step();
    results.add("loss", loss);
    results.add("penalty", penalty);
  }
  results.add("net", *net);
  return results;
}

TEST_CASE("a penalty on the gradient with respect to parameters() is differentiated", "[runtime][plain_programs]") {
  computes_the_same_sharded(gradient_penalty);
}

Results meta_learning(const Shard& shard) {
  auto net = make_net();
  shard(*net);
  Results results;
  for (int task = 0; task < 2; ++task) {
    auto parameters = net->parameters();
    std::vector<Tensor> start;
    for (const auto& parameter : parameters) start.push_back(parameter.detach().clone());
    for (int step = 0; step < 2; ++step) {
      auto loss = fit_loss(net, task);
      const auto gradients = torch::autograd::grad({loss}, parameters);
      torch::NoGradGuard no_grad;
      for (size_t i = 0; i < parameters.size(); ++i) parameters[i].sub_(0.1 * gradients[i]);
      results.add("loss on the task", loss);
    }
    torch::NoGradGuard no_grad;
    for (size_t i = 0; i < parameters.size(); ++i)
      parameters[i].copy_(start[i] + 0.5 * (parameters[i] - start[i]));
    results.add("loss after the task", fit_loss(net, task));
  }
  results.add("net", *net);
  return results;
}

TEST_CASE("inner steps by autograd::grad and by hand, then a way back, are those of the plain module",
          "[runtime][plain_programs]") {
  computes_the_same_sharded(meta_learning);
}

Results ema_teacher(const Shard& shard) {
  auto net = make_net();
  shard(*net);
  std::vector<Tensor> teacher;
  for (const auto& parameter : net->parameters()) teacher.push_back(parameter.detach().clone());
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.2).momentum(0.9).nesterov(true));
  Results results;
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    auto loss = fit_loss(net, step);
    loss.backward();
    optimizer.step();
    torch::NoGradGuard no_grad;
    auto parameters = net->parameters();
    for (size_t i = 0; i < teacher.size(); ++i) teacher[i].mul_(0.7).add_(parameters[i].detach(), 0.3);
    std::vector<Tensor> own;  // the teacher in the net's place for a while
    for (size_t i = 0; i < teacher.size(); ++i) {
      own.push_back(parameters[i].clone());
      parameters[i].copy_(teacher[i]);
    }
    results.add("teacher's loss", fit_loss(net, step));
    for (size_t i = 0; i < teacher.size(); ++i) parameters[i].copy_(own[i]);
    results.add("loss", loss);
  }
  for (const auto& tensor : teacher) results.add("teacher", tensor);
  results.add("net", *net);
  return results;
}

TEST_CASE("a teacher of detached clones follows the parameters and takes their place", "[runtime][plain_programs]") {
  computes_the_same_sharded(ema_teacher);
}

Results weight_norm(const Shard& shard) {
  auto net = make_net();
  shard(*net);
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.2));
  Results results;
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    auto loss = fit_loss(net, step);
    loss.backward();
    optimizer.step();
    torch::NoGradGuard no_grad;
    for (auto& weight : net->parameters())
      if (weight.dim() == 2) weight.div_(weight.norm(2, 1, true));  // rows of length 1
    results.add("loss", loss);
  }
  results.add("net", *net);
  {
    torch::NoGradGuard no_grad;
    for (auto& weight : net->parameters())
      if (weight.dim() == 2) weight.div_(weight.norm(2, 0, true));  // and columns
  }
  results.add("loss with columns of length 1", fit_loss(net, 0));
  results.add("net with columns of length 1", *net);
  return results;
}

TEST_CASE("weights divided by their norms in place have these norms in the next step", "[runtime][plain_programs]") {
  computes_the_same_sharded(weight_norm);
}

struct LowRankLinearImpl : torch::nn::Module {
  LowRankLinearImpl(int64_t in, int64_t out, int64_t rank) : base(in, out) {
    register_module("base", base);
    down = register_parameter("down", torch::randn({rank, in}) * 0.3);
    up = register_parameter("up", torch::zeros({out, rank}));
  }
  Tensor forward(const Tensor& x) { return base->forward(x) + x.matmul(down.t()).matmul(up.t()) * 0.5; }
  torch::nn::Linear base;
  Tensor down, up;
};
TORCH_MODULE(LowRankLinear);

Results train_low_rank(const Shard& shard) {
  auto net = seeded(21, [] {
    return torch::nn::Sequential(LowRankLinear(4, 7, 2), torch::nn::Tanh(), LowRankLinear(7, 2, 2));
  });
  net->to(kDtype);
  shard(*net);
  std::vector<Tensor> trained;
  int64_t trained_count = 0, count = 0;
  for (auto& parameter : net->named_parameters()) {
    if (parameter.key().find("base") != std::string::npos) parameter.value().requires_grad_(false);
    count += parameter.value().numel();
    if (!parameter.value().requires_grad()) continue;
    trained.push_back(parameter.value());
    trained_count += parameter.value().numel();
  }
  torch::optim::AdamW optimizer(trained, torch::optim::AdamWOptions(0.05));
  Results results;
  results.add("trained of all", static_cast<double>(trained_count) / static_cast<double>(count));
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    auto loss = fit_loss(net, 0);
    loss.backward();
    optimizer.step();
    results.add("loss", loss);
  }
  results.add("net", *net);
  // merged into the base
  auto named = net->named_parameters();
  torch::NoGradGuard no_grad;
  for (const std::string layer : {"0", "2"}) {
    named[layer + ".base.weight"].add_(named[layer + ".up"].matmul(named[layer + ".down"]), 0.5);
    named[layer + ".up"].zero_();
  }
  results.add("loss when merged", fit_loss(net, 0));
  results.add("merged", *net);
  return results;
}

TEST_CASE("low-rank factors of a frozen base are trained, counted and merged", "[runtime][plain_programs]") {
  computes_the_same_sharded(train_low_rank);
}

Results save_and_load(const Shard& shard) {
  auto net = make_net();
  shard(*net);
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.2));
  Results results;
  const auto train = [&](int step) {
    optimizer.zero_grad();
    auto loss = fit_loss(net, step);
    loss.backward();
    optimizer.step();
    results.add("loss", loss);
  };
  train(0);
  std::stringstream file;
  torch::save(net, file);
  auto loaded = make_net(8);  // a plain module, as another program has it
  torch::load(loaded, file);
  results.add("loss of the loaded net", fit_loss(loaded, 1));
  results.add("loaded", *loaded);
  train(1);
  train(2);
  std::stringstream back;
  torch::save(loaded, back);
  torch::load(net, back);
  results.add("loss of the net after its return", fit_loss(net, 1));
  train(1);
  results.add("net", *net);
  return results;
}

TEST_CASE("a module goes by torch::save and torch::load into a plain one and back, and trains on",
          "[runtime][plain_programs]") {
  computes_the_same_sharded(save_and_load);
}

torch::nn::LinearImpl& layer_of(torch::nn::Sequential& net, size_t place) { return *net->ptr<torch::nn::LinearImpl>(place); }

/// Steps by hand on what modules hold.
Results update_members(const Shard& shard) {
  auto net = make_net();
  shard(*net);
  Results results;
  for (int step = 0; step < 3; ++step) {
    net->zero_grad();
    auto loss = fit_loss(net, step);
    loss.backward();
    for (const size_t place : {0, 2, 4}) {
      auto& layer = layer_of(net, place);
      layer.weight.data() -= 0.05 * layer.weight.grad();
      layer.bias.data().sub_(layer.bias.grad(), 0.05);
      layer.weight.data().add_(layer.weight.grad() * layer.weight.data(), -0.01);
      layer.bias.detach().mul_(0.9).addcmul_(layer.bias.grad(), layer.bias.detach(), 0.02);
      results.add("decayed", layer.weight.data() - 0.1 * layer.weight.grad());
      results.add("needs no gradient", (layer.weight.data() * layer.weight.grad()).requires_grad());
    }
    results.add("loss", loss);
  }
  results.add("net", *net);
  return results;
}

TEST_CASE("steps by hand through data() of members, with gradients beside them, train the same", "[runtime][plain_programs]") {
  computes_the_same_sharded(update_members);
}

Results set_members(const Shard& shard) {
  auto net = make_net();
  shard(*net);
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.2));
  auto results = fit(net, optimizer, 1);
  auto& layer = layer_of(net, 2);
  layer.weight.set_data(torch::full({5, 7}, 0.25, kDtype));
  results.add("weight", layer.weight);
  results.add("loss", fit_loss(net, 1));
  layer.weight.set_data(layer.weight.data() * 2);
  layer.weight.set_data(layer.weight);
  for (const auto& [name, tensor] : fit(net, optimizer, 2).all) results.add(name, tensor);
  results.add("net", *net);
  return results;
}

TEST_CASE("set_data of a member is a write of the parameter", "[runtime][plain_programs]") {
  computes_the_same_sharded(set_members);
}

enum class Of { kParameters, kMembers, kBoth };
/// An optimizer in backward.
Results hook_accumulators(const Shard& shard, Of of) {
  auto net = make_net();
  shard(*net);
  using Accumulator = decltype(torch::autograd::impl::grad_accumulator(Tensor()));
  std::vector<Accumulator> kept;
  double calls = 0;
  auto parameters = net->parameters();
  const auto hook = [&](const Tensor& tensor, bool steps) {
    kept.push_back(torch::autograd::impl::grad_accumulator(tensor));
    kept.back()->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(
        [&calls, p = tensor, steps](const torch::autograd::variable_list& out, const torch::autograd::variable_list& in) mutable {
          ++calls;
          torch::NoGradGuard no_grad;
          if (!steps) return out;
          p.sub_(p.grad(), 0.05);
          p.add_(in.at(0), -0.05);
          p.mutable_grad() = Tensor();
          return out;
        }));
  };
  if (of != Of::kMembers)
    for (const auto& parameter : parameters) hook(parameter, of == Of::kParameters);
  if (of != Of::kParameters)
    for (const size_t place : {0, 2, 4}) {
      hook(layer_of(net, place).weight, true);
      hook(layer_of(net, place).bias, true);
    }
  Results results;
  for (int step = 0; step < 4; ++step) {
    auto loss = fit_loss(net, step);
    results.add("loss", loss);
    results.add("calls", calls);
    if (step == 2) {
      const auto gradients = torch::autograd::grad({loss}, parameters, {}, /*retain_graph=*/true);
      results.add("gradient", gradients[0]);
    }
    loss.backward();
    for (const auto& parameter : parameters) results.add("is left", parameter.grad().defined());
  }
  kept.clear();
  fit_loss(net, 0).backward();
  results.add("calls in the end", calls);
  for (const auto& parameter : parameters) results.add("gradient", parameter.grad());
  results.add("net", *net);
  return results;
}

TEST_CASE("hooks of gradient accumulators run when the gradient is there, once for each, for parameters() and for members",
          "[runtime][plain_programs]") {
  computes_the_same_sharded([](const Shard& shard) { return hook_accumulators(shard, Of::kParameters); });
  computes_the_same_sharded([](const Shard& shard) { return hook_accumulators(shard, Of::kMembers); });
  computes_the_same_sharded([](const Shard& shard) { return hook_accumulators(shard, Of::kBoth); });
}

/// A faster rate for the head, which is found by what it is.
Results rates_by_identity(const Shard& shard) {
  auto net = make_net();
  shard(*net);
  using torch::optim::SGDOptions;
  const auto& head = layer_of(net, 4);
  const std::set<c10::TensorImpl*> of_head{registered(head.weight).unsafeGetTensorImpl(), registered(head.bias).unsafeGetTensorImpl()};
  std::vector<Tensor> fast, slow;
  for (const auto& parameter : net->parameters())
    (of_head.count(parameter.unsafeGetTensorImpl()) > 0 ? fast : slow).push_back(parameter);
  Results results;
  results.add("fast", static_cast<double>(fast.size()));
  results.add("the weight", fast.at(0).is_same(registered(head.weight)));
  for (const auto& parameter : net->named_parameters())
    if (parameter.value().is_same(registered(layer_of(net, 2).bias))) results.add(parameter.key(), 1.0);
  torch::optim::SGD optimizer({torch::optim::OptimizerParamGroup(fast, std::make_unique<SGDOptions>(0.5)),
                               torch::optim::OptimizerParamGroup(slow, std::make_unique<SGDOptions>(SGDOptions(0.01).momentum(0.9)))},
                              SGDOptions(0.01));
  for (const auto& [name, tensor] : fit(net, optimizer, 3).all) results.add(name, tensor);
  const auto key = registered(layer_of(net, 0).weight).unsafeGetTensorImpl();
  results.add("momentum", static_cast<torch::optim::SGDParamState&>(*optimizer.state().at(key)).momentum_buffer());
  const auto other = torch::ones({2});
  results.add("of no module", registered(other).is_same(other));
  results.add("net", *net);
  return results;
}

TEST_CASE("parameter groups that are chosen by registered(member) are those of the plain module", "[runtime][plain_programs]") {
  computes_the_same_sharded(rates_by_identity);
}

/// Nesterov's momentum and decoupled weight decay, as somebody writes it who does not know torch::optim::Optimizer.
class OwnOptimizer {
 public:
  OwnOptimizer(std::vector<Tensor> parameters, double learning_rate)
      : parameters_(std::move(parameters)), learning_rate_(learning_rate) {}

  void zero_grad() {
    for (auto& parameter : parameters_)
      if (parameter.grad().defined()) parameter.mutable_grad().detach_().zero_();
  }

  void step() {
    torch::NoGradGuard no_grad;
    for (size_t i = 0; i < parameters_.size(); ++i) {
      auto& parameter = parameters_[i];
      const auto& gradient = parameter.grad();
      if (!gradient.defined()) continue;
      const auto [buffer, is_new] = buffers_.try_emplace(i);
      if (is_new) buffer->second = torch::zeros_like(parameter);
      buffer->second.mul_(0.9).add_(gradient);
      parameter.mul_(1 - learning_rate_ * 0.1);
      parameter.add_(gradient + 0.9 * buffer->second, -learning_rate_);
    }
  }

  const std::unordered_map<size_t, Tensor>& buffers() const { return buffers_; }

 private:
  std::vector<Tensor> parameters_;
  double learning_rate_;
  std::unordered_map<size_t, Tensor> buffers_;
};

Results own_optimizer(const Shard& shard) {
  auto net = make_net();
  shard(*net);
  OwnOptimizer optimizer(net->parameters(), 0.1);
  auto results = fit(net, optimizer, 4);
  for (size_t i = 0; i < optimizer.buffers().size(); ++i) results.add("momentum", optimizer.buffers().at(i));
  results.add("net", *net);
  return results;
}

TEST_CASE("an optimizer class of one's own steps the same, and its buffers are the whole's", "[runtime][plain_programs]") {
  computes_the_same_sharded(own_optimizer);
}

}  // namespace
}  // namespace fsdp::test::plain_programs
