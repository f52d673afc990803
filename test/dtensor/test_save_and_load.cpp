#include <catch2/catch.hpp>

#include <algorithm>
#include <random>
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

TEST_CASE("an optimizer over DTensors is saved and goes on after it is loaded", "[dtensor][save]") {
  on_worlds([](Rank& rank, const DeviceMesh& mesh, const std::vector<Placement>& placements) {
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
    Leaves plain, spread(mesh, placements);
    check_alike(rank, train(spread), train(plain), "AdamW");
  });
}

// As LibTorch does with an optimizer's state, which it writes in the order of addresses.
TEST_CASE("copies that each rank saves in an order of its own are in each rank's file as it has them", "[dtensor][save]") {
  on_worlds([](Rank& rank, const DeviceMesh& mesh, const std::vector<Placement>& placements) {
    const auto file = [&](const Leaves& leaves, uint64_t seed) {
      Tensors copies;
      for (const auto& leaf : leaves.all()) {
        copies.push_back(torch::zeros_like(leaf.detach()).add_(leaf.detach()));
        copies.push_back(leaf.detach().clone().mul_(2));
        copies.push_back(torch::ones_like(leaf.detach()).sub_(leaf.detach()));
      }
      std::shuffle(copies.begin(), copies.end(), std::mt19937_64(100 * seed + static_cast<uint64_t>(rank.index())));
      return saved(copies);
    };
    for (uint64_t seed = 0; seed < 5; ++seed)
      rank.check(file(Leaves(mesh, placements), seed) == file(Leaves(), seed), fmt::format("bytes, seed {}", seed));
  });
}

TEST_CASE("copies that are cut over different dimensions of a mesh are saved in any order", "[dtensor][save]") {
  on_ranks(4, [](Rank& rank) {
    const auto square = mesh_of(rank.world(), {2, 2});
    const std::vector<std::vector<Placement>> placed = {{Replicate{}, Shard{0}},
                                                        {Shard{0}, Replicate{}},
                                                        {Shard{0}, Shard{1}},
                                                        {Replicate{}, Replicate{}},
                                                        {Shard{1}, Shard{0}}};
    const auto file = [&](bool is_spread, uint64_t seed) {
      Tensors copies;
      for (size_t i = 0; i < placed.size(); ++i)
        for (const int64_t rows : {3, 4}) {
          const auto whole = values({rows, 5}, 10 * i);
          copies.push_back((is_spread ? at::Tensor(distribute_tensor(whole, square, placed[i])) : whole).clone());
        }
      // Of one dimension of the mesh.
      const auto whole = values({6, 2}, 77);
      copies.push_back((is_spread ? at::Tensor(distribute_tensor(whole, square["b"], {Shard{0}})) : whole).clone());
      std::shuffle(copies.begin(), copies.end(), std::mt19937_64(100 * seed + static_cast<uint64_t>(rank.index())));
      return saved(copies);
    };
    for (uint64_t seed = 0; seed < 10; ++seed)
      rank.check(file(true, seed) == file(false, seed), fmt::format("bytes, seed {}", seed));
  });
}

TEST_CASE("a save that not every rank has a part of ends in an error on all ranks", "[dtensor][save]") {
  on_ranks(2, [](Rank& rank) {
    const Leaves leaves(rank.mesh(), {Shard{0}});
    const auto copies = [&](size_t leaf) { return leaves.all()[leaf].detach().clone(); };
    const auto save_different = [&] { saved(Tensors{copies(rank.index() == 0 ? 0 : 1)}); };
    rank.check_throws<StateError>(save_different, {"torch::save", "different tensors", "fsdp::save_checkpoint"}, "other tensors");
    // As many of one kind on all ranks, or a place among them says nothing.
    Tensors more{copies(0)};
    if (rank.index() == 0) more.push_back(copies(0));
    rank.check_throws<StateError>([&] { saved(Tensors{more[0]}); }, {"torch::save", "different tensors"}, "more copies");
    more = {};
    rank.check(saved(Tensors{copies(0)}) == saved(Tensors{Leaves().all()[0].detach()}), "goes on");
  });
}

}  // namespace fsdp::test
