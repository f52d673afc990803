#include <catch2/catch.hpp>

#include <functional>
#include <map>
#include <sstream>

#include "support/ranks.hpp"

// set_data of parameters: who shows the old values keeps them, as LibTorch gives the parameter other memory.

namespace fsdp::test::set_data {
namespace {

using at::Tensor;

torch::nn::Sequential make_net() {
  return seeded(3, [] { return torch::nn::Sequential(torch::nn::Linear(4, 5), torch::nn::Tanh(), torch::nn::Linear(5, 4)); });
}

std::vector<Tensor> entries(torch::nn::Sequential& net) { return net->parameters(); }
std::vector<Tensor> members(torch::nn::Sequential& net) {
  const auto& first = *net->ptr<torch::nn::LinearImpl>(0);
  const auto& last = *net->ptr<torch::nn::LinearImpl>(2);
  return {first.weight, first.bias, last.weight, last.bias};
}

Tensor batch() { return torch::sin(torch::arange(12.0).view({3, 4})); }

/// What else shows a parameter.
const std::map<std::string, std::function<Tensor(const Tensor&)>>& aliases() {
  static const std::map<std::string, std::function<Tensor(const Tensor&)>> all = {
      {"data()", [](const Tensor& p) { return p.data(); }},
      {"data() that was read", [](const Tensor& p) { auto data = p.data(); data.sum(); return data; }},
      {"detach()", [](const Tensor& p) { return p.detach(); }},
      {"a view of data()", [](const Tensor& p) { return p.data().narrow(0, 1, 3); }},
      {"all in one row", [](const Tensor& p) { const torch::NoGradGuard no_grad; return p.view({-1}); }},
      {"a column", [](const Tensor& p) { const torch::NoGradGuard no_grad; return p.view({p.size(0), -1}).select(1, 0); }},
  };
  return all;
}

/// What leaves parameters in one state or another.
const std::map<std::string, std::function<void(torch::nn::Sequential&)>>& states() {
  static const std::map<std::string, std::function<void(torch::nn::Sequential&)>> all = {
      {"at rest", [](auto&) {}},
      {"behind an evaluation", [](auto& net) { const torch::NoGradGuard no_grad; net->forward(batch()); }},
      {"behind a forward without a backward", [](auto& net) { net->forward(batch()); }},
      {"behind a step", [](auto& net) { net->forward(batch()).sum().backward(); }},
  };
  return all;
}

Tensor whole(const Tensor& tensor) {
  const torch::NoGradGuard no_grad;
  return is_dtensor(tensor) ? full_tensor(tensor) : tensor.clone();
}

using Parameters = std::vector<Tensor> (*)(torch::nn::Sequential&);

}  // namespace

TEST_CASE("an average that data() and set_data swap in and out again leaves the parameters as they were", "[runtime][set_data]") {
  const Parameters of = GENERATE(&entries, &members);
  const bool keeps = GENERATE(false, true);
  CAPTURE(of == &entries, keeps);
  for (const int world_size : {1, 2, 3})
    on_ranks(world_size, [&](Rank& rank) {
      for (const auto& [state, come_to] : states()) {
        auto plain = make_net(), sharded = make_net();
        fully_shard(*sharded->ptr(0), {.mesh = rank.mesh(), .reshard_after_forward = !keeps});
        fully_shard(*sharded, {.mesh = rank.mesh(), .reshard_after_forward = !keeps});
        std::vector<Tensor> outputs[2];
        for (auto* net : {&plain, &sharded}) {
          auto& seen = outputs[net == &sharded];
          std::vector<Tensor> averages;
          for (const auto& p : of(*net)) averages.push_back(p.data().clone());
          for (int step = 0; step < 3; ++step) {
            (*net)->zero_grad();
            (*net)->forward(batch()).square().mean().backward();
            const torch::NoGradGuard no_grad;
            for (auto& p : (*net)->parameters()) p.sub_(p.grad(), 0.5);
            std::vector<Tensor> backups;
            const auto parameters = of(*net);
            for (size_t i = 0; i < parameters.size(); ++i) averages[i] = averages[i] * 0.5 + parameters[i].data() * 0.5;
            {
              const torch::AutoGradMode records(true);
              come_to(*net);
            }
            for (size_t i = 0; i < parameters.size(); ++i) {
              backups.push_back(parameters[i].data());
              parameters[i].set_data(averages[i]);
            }
            seen.push_back((*net)->forward(batch()));
            for (size_t i = 0; i < parameters.size(); ++i) parameters[i].set_data(backups[i]);
            seen.push_back((*net)->forward(batch()));
          }
        }
        for (size_t i = 0; i < outputs[0].size(); ++i)
          rank.check_close(outputs[1][i], outputs[0][i], fmt::format("{}, output {}", state, i));
      }
    });
}

TEST_CASE("what shows a parameter keeps the values of before set_data, and writes to it stay its own", "[runtime][set_data]") {
  const Parameters of = GENERATE(&entries, &members);
  const Parameters set = GENERATE(&entries, &members);
  CAPTURE(of == &entries, set == &entries);
  for (const int world_size : {1, 2})
    on_ranks(world_size, [&](Rank& rank) {
      for (const auto& [state, come_to] : states())
        for (const auto& [which, alias_of] : aliases()) {
          const auto what = state + ", " + which;
          auto plain = make_net(), sharded = make_net();
          fully_shard(*sharded->ptr(0), {.mesh = rank.mesh()});
          fully_shard(*sharded, {.mesh = rank.mesh()});
          std::vector<Tensor> left[2];
          for (auto* net : {&plain, &sharded}) {
            come_to(*net);
            for (const auto& p : of(*net)) left[net == &sharded].push_back(alias_of(p));
            const auto parameters = set(*net);
            for (size_t i = 0; i < parameters.size(); ++i)
              parameters[i].set_data(torch::full(parameters[i].sizes(), 0.1 * (static_cast<double>(i) + 1)));
          }
          const auto compare = [&](const std::string& when) {
            for (size_t i = 0; i < left[0].size(); ++i)
              rank.check_close(whole(left[1][i]), left[0][i], fmt::format("{}, {}: what shows parameter {}", what, when, i));
            const torch::NoGradGuard no_grad;
            rank.check_close(sharded->forward(batch()), plain->forward(batch()), what + ", " + when + ": forward");
          };
          compare("set");
          const torch::NoGradGuard no_grad;
          for (auto* net : {&plain, &sharded})
            for (auto& one : left[net == &sharded]) one.mul_(2);
          compare("what shows them is written");
          for (auto* net : {&plain, &sharded})
            for (auto& p : (*net)->parameters()) p.mul_(3);
          compare("parameters are written");
          {
            const torch::AutoGradMode records(true);
            for (auto* net : {&plain, &sharded}) {
              (*net)->zero_grad();
              (*net)->forward(batch()).square().mean().backward();
            }
          }
          const auto expected = plain->parameters(), found = sharded->parameters();
          for (size_t i = 0; i < found.size(); ++i) {
            rank.check(is_fsdp_parameter(found[i]), what + ": still the parameter");
            rank.check_close(full_tensor(found[i].grad()), expected[i].grad(), what + ": its gradient");
          }
        }
    });
}

TEST_CASE("set_data of a parameter that nothing else shows communicates nothing", "[runtime][set_data]") {
  on_ranks(2, [](Rank& rank) {
    auto net = make_net();
    fully_shard(*net, {.mesh = rank.mesh()});
    net->forward(batch()).sum().backward();
    net->zero_grad();
    rank.log().clear();
    for (const auto of : {&entries, &members})
      for (const auto& p : of(net)) p.set_data(torch::ones(p.sizes()));
    rank.check(rank.calls().empty(), fmt::format("none, but {}", rank.calls()));
    std::vector<Tensor> backups;
    for (const auto& p : entries(net)) {
      backups.push_back(p.data());
      p.set_data(torch::zeros(p.sizes()));
    }
    rank.check(rank.calls().empty(), fmt::format("nor with data() of entries, but {}", rank.calls()));
  });
}

TEST_CASE("set_data parts what one rank's parameters share, and leaves the other one its values", "[runtime][set_data]") {
  const Parameters of = GENERATE(&entries, &members);
  CAPTURE(of == &entries);
  on_ranks(1, [&](Rank& rank) {
    for (const auto& [state, come_to] : states()) {
      const auto make_tied = [] {
        auto net = seeded(3, [] { return torch::nn::Sequential(torch::nn::Linear(4, 4), torch::nn::Tanh(), torch::nn::Linear(4, 4)); });
        members(net)[2].set_data(members(net)[0].data());
        return net;
      };
      auto plain = make_tied(), sharded = make_tied();
      fully_shard(*sharded->ptr(0), {.mesh = rank.mesh()});
      fully_shard(*sharded, {.mesh = rank.mesh()});
      for (auto* net : {&plain, &sharded}) {
        for (auto& p : (*net)->parameters()) p.mutable_grad().reset();
        come_to(*net);
        entries(*net)[1].set_requires_grad(false);
        of(*net)[0].set_data(torch::full({4, 4}, 0.5));
        rank.check(!entries(*net)[1].requires_grad(), state + ": frozen before");
        entries(*net)[1].set_requires_grad(true);
        (*net)->zero_grad();
        (*net)->forward(batch()).square().mean().backward();
        const torch::NoGradGuard no_grad;
        for (auto& p : (*net)->parameters()) p.sub_(p.grad(), 0.5);
      }
      const auto found = sharded->parameters(), expected = plain->parameters();
      for (size_t i = 0; i < found.size(); ++i)
        rank.check_close(whole(found[i]), expected[i].detach(), fmt::format("{}: parameter {}", state, i));
    }
  });
}

TEST_CASE("an archive is read into members and into parameters()", "[runtime][set_data]") {
  for (const int world_size : {1, 2})
    on_ranks(world_size, [&](Rank& rank) {
      for (const auto of : {&entries, &members}) {
        auto plain = make_net(), sharded = make_net();
        fully_shard(*sharded, {.mesh = rank.mesh()});
        std::stringstream file;
        torch::serialize::OutputArchive out;
        for (const auto& p : plain->named_parameters()) out.write(p.key() == "0.weight" ? "w" : p.key(), p.value().detach() + 1);
        out.save_to(file);
        torch::serialize::InputArchive in;
        in.load_from(file);
        auto weight = of(sharded)[0];
        in.read("w", weight);
        rank.check_close(full_tensor(weight), plain->parameters()[0] + 1, "what was read");
        rank.check(weight.is_same(of(sharded)[0]), "into the same tensor");
        {
          const torch::NoGradGuard no_grad;
          plain->parameters()[0].add_(1);
        }
        rank.check_close(sharded->forward(batch()), plain->forward(batch()), "forward");
        const torch::NoGradGuard no_grad;
        rank.check_throws<UsageError>([&] { weight.set_(torch::zeros({2, 2})); }, {"0.weight", "(2, 2)"}, "other sizes");
      }
    });
}

TEST_CASE("an ordinary tensor is given a parameter's values, and keeps them", "[runtime][set_data]") {
  const Parameters of = GENERATE(&entries, &members);
  CAPTURE(of == &entries);
  for (const int world_size : {1, 2})
    on_ranks(world_size, [&](Rank& rank) {
      for (const auto& [state, come_to] : states())
        for (const bool is_data : {true, false}) {
          auto plain = make_net(), sharded = make_net();
          fully_shard(*sharded->ptr(0), {.mesh = rank.mesh()});
          fully_shard(*sharded, {.mesh = rank.mesh()});
          come_to(sharded);
          for (size_t i = 0; i < 4; ++i) {
            // An exchange with a tensor that is not sharded.
            auto ordinary = torch::full(plain->parameters()[i].sizes(), 0.25, torch::requires_grad());
            const auto parameter = of(sharded)[i], expected = plain->parameters()[i].detach().clone();
            const auto values = ordinary.data().clone();
            ordinary.set_data(is_data ? parameter.data() : parameter);
            parameter.set_data(values);
            const auto what = fmt::format("{}, parameter {}", state, i);
            rank.check(!is_dtensor(ordinary) && ordinary.requires_grad(), what + ": an ordinary leaf");
            rank.check_identical(ordinary.detach(), expected, what + ": what the ordinary tensor has");
            rank.check_identical(whole(of(sharded)[i]), values, what + ": what the parameter has");
            const torch::NoGradGuard no_grad;
            ordinary.mul_(2);
            rank.check_identical(whole(of(sharded)[i]), values, what + ": the parameter, once the other is written");
          }
        }
    });
}

TEST_CASE("an ordinary tensor is given a parameter's sizes", "[runtime][set_data]") {
  on_ranks(2, [](Rank& rank) {
    auto net = make_net();
    fully_shard(*net, {.mesh = rank.mesh()});
    for (const auto of : {&entries, &members}) {
      auto plain = torch::zeros({1});
      const torch::NoGradGuard no_grad;
      plain.resize_as_(of(net)[0]);
      rank.check_equal(plain.sizes(), c10::IntArrayRef({5, 4}), "sizes");
      rank.check_throws<UsageError>([&] { of(net)[0].resize_as_(torch::zeros({2})); }, {"0.weight"}, "the other way round");
    }
  });
}

}  // namespace fsdp::test::set_data
