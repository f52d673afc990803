// Trains on the ranks that a launcher started, each with its parameters at other addresses, and saves the optimizer through
// torch::save on all of them. Each loads its file into a plain optimizer, which must go on as that of the plain program does.
// Ranks are processes here, as a user's are, with an allocator each. Run by test_optimizer_save.py.
#include <torch/torch.h>
#include <fsdp/fsdp.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "support/sample.hpp"

namespace fsdp::test::optimizer_save {
namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;
namespace optim = torch::optim;

struct NetImpl : torch::nn::Module {
  NetImpl() {
    torch::manual_seed(3);
    for (int i = 0; i < 6; ++i) layers.push_back(register_module(fmt::format("layer{}", i), torch::nn::Linear(5, 5)));
  }
  Tensor forward(Tensor x) {
    for (auto& layer : layers) x = torch::tanh(layer->forward(x)) + x;
    return x;
  }
  std::vector<torch::nn::Linear> layers;
};
TORCH_MODULE(Net);

struct Kind {
  std::string name;
  std::function<std::unique_ptr<optim::Optimizer>(Tensors)> make;
};
const std::vector<Kind> kKinds = {
    {"AdamW", [](Tensors p) { return std::make_unique<optim::AdamW>(p, optim::AdamWOptions(0.01).amsgrad(true)); }},
    {"SGD", [](Tensors p) { return std::make_unique<optim::SGD>(p, optim::SGDOptions(0.01).momentum(0.9)); }},
    {"RMSprop", [](Tensors p) { return std::make_unique<optim::RMSprop>(p, optim::RMSpropOptions(0.01).momentum(0.9)); }},
    {"Adagrad", [](Tensors p) { return std::make_unique<optim::Adagrad>(p, optim::AdagradOptions(0.01)); }},
};

/// Free blocks of the sizes that tensors have, in an order of this rank's own: what is made next lies there.
void scatter_memory(uint64_t seed) {
  static std::vector<std::unique_ptr<char[]>> pins;  // between them, so that they do not join
  std::vector<std::unique_ptr<char[]>> blocks;
  for (size_t bytes = 150; bytes < 600; bytes += 16)
    for (int i = 0; i < 40; ++i) {
      blocks.push_back(std::make_unique<char[]>(bytes));
      pins.push_back(std::make_unique<char[]>(24));
    }
  std::shuffle(blocks.begin(), blocks.end(), std::mt19937_64(seed));
}

/// Sets the gradients of one step, which are the same on all ranks.
using Backward = std::function<void(int step)>;

Backward backward_of(Net& net) {
  return [&net](int step) { net->forward((torch::arange(10.).view({2, 5}) - step) / 7).square().mean().backward(); };
}
Backward gradients_of(const Tensors& params) {
  return [params](int step) {
    for (size_t i = 0; i < params.size(); ++i)
      params[i].mutable_grad() =
          torch::sin(torch::arange(params[i].numel()).view(params[i].sizes()) + 10 * static_cast<int>(i) + step);
  };
}

void train(const Backward& backward, optim::Optimizer& optimizer, int first) {
  for (int step = first; step < first + 3; ++step) {
    optimizer.zero_grad();
    backward(step);
    optimizer.step();
  }
}

/// The weights are cut by tensor parallelism, the biases are not; then all by data parallelism.
struct TensorParallelNet : torch::nn::Module {
  TensorParallelNet(const Net& plain, const fsdp::DeviceMesh& mesh) {
    const auto tp = mesh["tp"];
    for (const auto& item : plain->named_parameters()) {
      auto name = item.key();
      std::ranges::replace(name, '.', '_');
      auto part = item.value().detach();
      if (part.dim() == 2) part = tp.get_local_rank() == 0 ? part.narrow(0, 0, 3) : part.narrow(0, 3, 2);
      register_parameter(name, part.clone());
    }
    fsdp::FullyShardOptions options{.mesh = mesh, .dp_mesh_dims = fsdp::DataParallelMeshDims{.shard = "dp"}};
    options.tensor_parallel_fn = [](const std::string&, const Tensor& parameter) -> std::optional<fsdp::TensorParallel> {
      if (parameter.dim() < 2) return std::nullopt;
      return fsdp::TensorParallel{{fsdp::Shard{0}}, {5, 5}};
    };
    fsdp::fully_shard(*this, options);
  }
};

/// Which parameter's state a save writes at each place.
Tensor order_of(const optim::Optimizer& optimizer) {
  const auto& params = optimizer.param_groups()[0].params();
  std::vector<int64_t> order;
  for (const auto& [key, _] : optimizer.state()) {
    const auto is_its = [&](const Tensor& each) { return static_cast<void*>(each.unsafeGetTensorImpl()) == key; };
    order.push_back(std::ranges::find_if(params, is_its) - params.begin());
  }
  return torch::tensor(order);
}

bool differs_by_rank(const Tensor& own, const fsdp::DeviceMesh& mesh) {
  const std::vector<fsdp::Placement> by_rank(1, fsdp::Shard{0});
  const auto all = fsdp::DTensor::from_local(own.unsqueeze(0), mesh, by_rank).full_tensor();
  return !all.eq(all[0]).all().item<bool>();
}

std::string saved(const optim::Optimizer& optimizer) {
  std::ostringstream out;
  torch::save(optimizer, out);
  return out.str();
}
void load(optim::Optimizer& optimizer, const std::string& file) {
  std::istringstream in(file);
  torch::load(optimizer, in);
}

/// The sharded program's optimizer is to go on in the plain program and in another sharded one.
class Comparison {
 public:
  explicit Comparison(std::shared_ptr<fsdp::Communicator> world)
      : world_(std::move(world)), line_(fsdp::init_device_mesh(world_, {world_->size()}, {"all"})) {}

  void compare(const Kind& kind, const fsdp::FullyShardOptions& options, const std::string& what) {
    if (!sample_.takes_next()) return;
    scatter_memory(next_seed());
    Net plain, sharded;
    for (auto& layer : sharded->layers) fsdp::fully_shard(layer, options);
    fsdp::fully_shard(sharded, options);
    compare(kind, plain, backward_of(plain), sharded->parameters(), backward_of(sharded), what);
  }
  void compare_tensor_parallel(const Kind& kind, const fsdp::DeviceMesh& mesh) {
    if (!sample_.takes_next()) return;
    scatter_memory(next_seed());
    Net plain;
    const TensorParallelNet sharded(plain, mesh);
    compare(kind, plain, gradients_of(plain->parameters()), sharded.parameters(), gradients_of(sharded.parameters()),
            "with tensor parallelism");
  }
  int compared() const { return compared_; }
  int different() const { return different_; }
  bool is_right() const { return is_right_; }

 private:
  uint64_t next_seed() const { return static_cast<uint64_t>(100 * compared_ + world_->rank()); }

  void compare(const Kind& kind, Net& plain, const Backward& plain_backward, const Tensors& sharded, const Backward& backward,
               const std::string& what) {
    const auto expected = kind.make(plain->parameters()), before = kind.make(sharded);
    train(plain_backward, *expected, 0);
    train(backward, *before, 0);
    different_ += differs_by_rank(order_of(*before), line_);
    const auto file = saved(*before);

    const auto in_plain_params = copies_of(plain->parameters());
    const auto in_plain = kind.make(in_plain_params), after = kind.make(sharded);
    load(*in_plain, file);
    load(*after, file);
    // The plain program's gradients for both plain ones: what differs is the state alone.
    for (int step = 3; step < 6; ++step) {
      expected->zero_grad();
      plain_backward(step);
      for (size_t i = 0; i < in_plain_params.size(); ++i)
        in_plain_params[i].mutable_grad() = plain->parameters()[i].grad().clone();
      expected->step();
      in_plain->step();
    }
    train(backward, *after, 3);
    for (size_t i = 0; i < sharded.size(); ++i) {
      const auto name = fmt::format("{} {}, {}", kind.name, what, plain->named_parameters()[i].key());
      check(in_plain_params[i], plain->parameters()[i], name + " in the plain program");
      check(fsdp::full_tensor(sharded[i]), plain->parameters()[i], name + " on ranks");
    }
    ++compared_;
  }
  static Tensors copies_of(const Tensors& tensors) {
    Tensors copies;
    for (const auto& tensor : tensors) copies.push_back(tensor.detach().clone().set_requires_grad(true));
    return copies;
  }
  void check(const Tensor& found, const Tensor& expected, const std::string& what) {
    if (torch::allclose(found.detach(), expected.detach(), 1e-4, 1e-5)) return;
    is_right_ = false;
    fmt::print("rank {}: {}: off by {}\n", world_->rank(), what,
               (found.detach() - expected.detach()).abs().max().item<double>());
  }

  std::shared_ptr<fsdp::Communicator> world_;
  fsdp::DeviceMesh line_;
  Sample sample_{2};
  int compared_ = 0, different_ = 0;
  bool is_right_ = true;
};

void compare_all(Comparison& comparison, const std::shared_ptr<fsdp::Communicator>& world) {
  const auto mesh = fsdp::init_device_mesh(world, {world->size()}, {"shard"});
  for (const auto& kind : kKinds) {
    comparison.compare(kind, {.mesh = mesh}, "in rows");
    comparison.compare(kind, {.mesh = mesh, .layout = fsdp::ParamLayout::kFlat}, "flat");
    comparison.compare(kind, {.mesh = mesh, .offload_policy = fsdp::CPUOffloadPolicy{}}, "offloaded");
  }
  if (world->size() % 2 != 0) return;
  const auto square = fsdp::init_device_mesh(world, {2, world->size() / 2}, {"replicate", "shard"});
  for (const auto& kind : kKinds) comparison.compare(kind, {.mesh = square}, "on replicas");
  if (world->size() != 4) return;
  const auto tensor_parallel = fsdp::init_device_mesh(world, {2, 2}, {"dp", "tp"});
  for (const auto& kind : kKinds) comparison.compare_tensor_parallel(kind, tensor_parallel);
}

}  // namespace

int run(int, char**) {
  try {
    const auto world = fsdp::init_process_group({.backend = "gloo"});
    Comparison comparison(world);
    compare_all(comparison, world);
    fmt::print("{} compared, {} in orders that differ by rank\n", comparison.compared(), comparison.different());
    return comparison.is_right() ? 0 : 2;
  } catch (const std::exception& error) {
    const auto* of_libtorch = dynamic_cast<const c10::Error*>(&error);
    fmt::print("ended with: {}\n", of_libtorch != nullptr ? of_libtorch->what_without_backtrace() : error.what());
    return 1;
  }
}

}  // namespace fsdp::test::optimizer_save
