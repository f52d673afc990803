#include <catch2/catch.hpp>

#include <sstream>

#include "programs.hpp"

namespace fsdp::test {
namespace {

template <class T>
std::string saved(const T& value) {
  std::ostringstream out;
  torch::save(value, out);
  return out.str();
}

}  // namespace

TEST_CASE("torch::save of DTensors and their views writes the plain file's bytes", "[dtensor][save]") {
  on_worlds([](Rank& rank, const DeviceMesh& mesh, const std::vector<Placement>& placements) {
    const auto file = [](const Leaves& leaves) {
      Tensors tensors;
      for (const auto& leaf : leaves.all()) {
        tensors.push_back(leaf.detach());
        tensors.push_back(leaf.detach().view(-1));
        if (leaf.dim() > 1) tensors.push_back(leaf.detach()[1]);
      }
      return saved(tensors);
    };
    rank.check(file(Leaves(mesh, placements)) == file(Leaves()), "bytes");
  });
}

TEST_CASE("torch::load of a plain module's file into one of DTensors keeps this rank's part", "[dtensor][save]") {
  on_worlds([](Rank& rank, const DeviceMesh& mesh, const std::vector<Placement>& placements) {
    // A module whose parameters were registered as DTensors.
    struct NetImpl : torch::nn::Module {
      explicit NetImpl(const Leaves& leaves) {
        for (size_t i = 0; i < leaves.all().size(); ++i) register_parameter(std::to_string(i), leaves.all()[i]);
      }
    };
    const auto plain = std::make_shared<NetImpl>(Leaves());
    const auto spread = std::make_shared<NetImpl>(Leaves(mesh, placements));
    const std::string file = saved(std::shared_ptr<torch::nn::Module>(plain));
    {
      const torch::NoGradGuard no_grad;
      for (auto& parameter : spread->parameters()) parameter.zero_();
    }
    std::istringstream in(file);
    std::shared_ptr<torch::nn::Module> module = spread;
    torch::load(module, in);
    for (const auto& parameter : spread->parameters()) rank.check(is_dtensor(parameter), "is a DTensor");
    check_alike(rank, spread->parameters(), plain->parameters(), "values");
    rank.check(saved(std::shared_ptr<torch::nn::Module>(spread)) == file, "bytes of the module");
  });
}

// On one rank: LibTorch saves an optimizer's state in the order of its parameters' addresses, which ranks do not share.
TEST_CASE("an optimizer over DTensors is saved and goes on after it is loaded", "[dtensor][save]") {
  const auto train = [](Leaves& leaves) {
    torch::optim::AdamW before(leaves.all(), 0.1), after(leaves.all(), 0.1);
    for (uint64_t step = 0; step < 2; ++step) {
      leaves.set_gradients(step);
      before.step();
    }
    std::istringstream in(saved(before));
    torch::load(after, in);
    leaves.set_gradients(3);
    after.step();
    return leaves.all();
  };
  on_ranks(1, [&](Rank& rank) {
    Leaves plain, spread(rank.mesh(), {Shard{0}});
    check_alike(rank, train(spread), train(plain), "AdamW");
  });
}

}  // namespace fsdp::test
