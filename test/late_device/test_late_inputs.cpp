// A root's inputs, which go to its device.
#include <catch2/catch.hpp>

#include "base/require.hpp"
#include "late_ranks.hpp"
#include "support/models.hpp"

namespace fsdp::test {
namespace {

using Batch = std::map<std::string, std::vector<at::Tensor>>;
using Named = std::pair<std::string, std::optional<at::Tensor>>;

/// Adds up what it is given, through a linear module that is sharded, too. Throws where anything is elsewhere.
struct AdderImpl : torch::nn::Module {
  AdderImpl()
      : inner(register_module("inner", torch::nn::Linear(4, 4))), scale(register_parameter("scale", torch::ones({4}))) {}

  at::Tensor forward(const at::Tensor& x, const std::tuple<Batch, Named>& others, const at::Tensor& none, int factor) {
    require(!none.defined(), "undefined tensors stay so");
    auto sum = x;
    for (const auto& [name, tensors] : std::get<0>(others))
      for (const auto& tensor : tensors) sum = sum + tensor;
    if (const auto& last = std::get<1>(others).second) sum = sum + *last;
    return fsdp::call(inner, sum) * scale * factor;
  }

  torch::nn::Linear inner;
  at::Tensor scale;
};
TORCH_MODULE(Adder);

std::tuple<Batch, Named> others_on(c10::Device device) {
  const auto filled = [&](double value) { return torch::full({2, 4}, value).to(device); };
  return {{{"a", {filled(1), filled(2)}}, {"b", {}}}, {"c", filled(3)}};
}

Adder sharded_adder(const LateRank& rank) {
  auto model = seeded(3, [] { return Adder(); });
  const FullyShardOptions options = {.mesh = init_device_mesh(rank.world, {rank.size()}, {"shard"}, {.device_type = kLate})};
  fully_shard(model->inner, options);
  fully_shard(model, options);
  return model;
}

}  // namespace

TEST_CASE("the inputs of a root's call go to its device, however deep they are", "[late][inputs]") {
  auto plain = seeded(3, [] { return Adder(); });
  const auto x = torch::arange(8.).view({2, 4});
  const auto expected = plain->forward(x, others_on(at::kCPU), {}, 2);
  CHECK(errors_on_late({}, [&](LateRank& rank) {
          auto model = sharded_adder(rank);
          for (const auto device : {c10::Device(at::kCPU), rank.device()}) {
            const auto output = fsdp::call(model, x.to(device), others_on(device), at::Tensor(), 2);
            require(output.device() == rank.device(), "the output is on {}", output.device().str());
            require(output.cpu().allclose(expected), "another output");
          }
        }) == std::vector<std::string>{"", ""});
}

TEST_CASE("inputs that are there already are what forward gets", "[late][inputs]") {
  struct KeepsImpl : torch::nn::Module {
    KeepsImpl() : scale(register_parameter("scale", torch::ones({4}))) {}
    at::Tensor forward(const at::Tensor& x) {
      seen = x;
      return x * scale;
    }
    at::Tensor scale, seen;
  };
  CHECK(errors_on_late({}, [](LateRank& rank) {
          const auto module = std::make_shared<KeepsImpl>();
          fully_shard(*module, {.mesh = init_device_mesh(rank.world, {rank.size()}, {"shard"})});
          const auto x = torch::ones({2, 4}).to(rank.device());
          fsdp::call(module, x);
          require(module->seen.is_same(x), "another tensor");
        }) == std::vector<std::string>{"", ""});
}

TEST_CASE("a module inside a root gets its inputs as the root's forward passes them", "[late][inputs]") {
  CHECK(errors_on_late({}, [](LateRank& rank) {
          auto model = sharded_adder(rank);
          const auto scope = fsdp::forward_scope(*find_fsdp_module(*model));
          std::string message = "nothing was thrown";
          try {
            fsdp::call(model->inner, torch::ones({2, 4}));
          } catch (const std::exception& error) {
            message = error.what();
          }
          require(message != "nothing was thrown", "a host's tensor was moved below the root");
        }) == std::vector<std::string>{"", ""});
}

}  // namespace fsdp::test
