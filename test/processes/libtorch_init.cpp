// Fills sharded tensors with every function of torch::nn::init, on the ranks that a launcher started, and compares them with
// whole ones filled from the same seed. Ranks are processes here because threads would share LibTorch's generator. Run by
// test_libtorch_init.py.
#include <torch/torch.h>
#include <fsdp/fsdp.hpp>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "support/sample.hpp"

namespace fsdp::test::libtorch_init {
namespace {

namespace init = torch::nn::init;
using at::Tensor;
using fsdp::DeviceMesh;
using fsdp::Placement;
using fsdp::Replicate;
using fsdp::Shard;
using fsdp::StridedShard;

struct Init {
  std::string name;
  std::function<void(Tensor)> fill;
};
const std::vector<Init> kInits = {
    {"constant_", [](Tensor t) { init::constant_(t, 0.5); }},
    {"dirac_", [](Tensor t) { init::dirac_(t); }},
    {"eye_", [](Tensor t) { init::eye_(t); }},
    {"normal_", [](Tensor t) { init::normal_(t, 1, 0.5); }},
    {"ones_", [](Tensor t) { init::ones_(t); }},
    {"orthogonal_", [](Tensor t) { init::orthogonal_(t); }},
    {"orthogonal_ with a gain", [](Tensor t) { init::orthogonal_(t, 3); }},
    {"sparse_", [](Tensor t) { init::sparse_(t, 0.4); }},
    {"sparse_ of all", [](Tensor t) { init::sparse_(t, 1); }},
    {"uniform_", [](Tensor t) { init::uniform_(t, -1, 2); }},
    {"kaiming_normal_", [](Tensor t) { init::kaiming_normal_(t); }},
    {"kaiming_normal_ by fan out", [](Tensor t) { init::kaiming_normal_(t, 0, torch::kFanOut, torch::kReLU); }},
    {"kaiming_uniform_", [](Tensor t) { init::kaiming_uniform_(t, std::sqrt(5)); }},
    {"kaiming_uniform_ by fan out", [](Tensor t) { init::kaiming_uniform_(t, 0, torch::kFanOut, torch::kTanh); }},
    {"xavier_normal_", [](Tensor t) { init::xavier_normal_(t, 2); }},
    {"xavier_uniform_", [](Tensor t) { init::xavier_uniform_(t); }},
    {"zeros_", [](Tensor t) { init::zeros_(t); }},
    // LibTorch has no trunc_normal_; this is how PyTorch computes it.
    {"a truncated normal distribution",
     [](Tensor t) {
       const torch::NoGradGuard no_grad;
       t.uniform_(-0.9, 0.7).erfinv_().mul_(0.5 * std::sqrt(2.0)).add_(0.1).clamp_(-0.4, 0.4);
     }},
    // What a program writes by hand: a row and a column, from tensors that it drew itself.
    {"rows and columns",
     [](Tensor t) {
       const torch::NoGradGuard no_grad;
       t.normal_();
       if (t.dim() < 2) return;
       t[-1].copy_(torch::randn(t[0].sizes()));
       t.select(1, 0).uniform_();
     }},
};

/// Fewer rows than ranks, as many, and more; with a remainder or without.
const std::vector<std::vector<int64_t>> kSizes = {{},        {1},       {7},       {6, 4},       {4, 6},          {2, 5},
                                                  {1, 3},    {7, 3},    {6, 4, 3}, {2, 3, 5},    {5, 2, 2, 3},    {1, 4, 2, 2},
                                                  {3, 3, 3}, {4, 1, 2}, {4, 4, 1}, {2, 2, 2, 2, 2}};

/// The error, or "". `tensor` has the values then.
std::string error_of(const Init& init, const Tensor& tensor) {
  torch::manual_seed(7);
  try {
    init.fill(tensor);
    return "";
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
}

Tensor whole_of(const Tensor& sharded) {
  return (fsdp::is_fsdp_parameter(sharded) ? fsdp::full_tensor(sharded) : fsdp::DTensor(sharded).full_tensor()).detach();
}

class Comparison {
 public:
  explicit Comparison(int rank) : rank_(rank) {}

  /// What an initializer does to `sharded`, which is filled by them one after another.
  void compare(const Tensor& sharded, const std::string& what) {
    for (const auto& init : kInits)
      if (sample_.takes_next()) compare(sharded, init, what);
  }
  int64_t count() const { return count_; }
  bool is_right() const { return is_right_; }

 private:
  void compare(const Tensor& sharded, const Init& init, const std::string& what) {
    const auto whole = torch::zeros(sharded.sizes(), sharded.options().requires_grad(false));
    {
      const torch::NoGradGuard no_grad;
      sharded.zero_();
    }
    const auto wanted = error_of(init, whole);
    const auto next = torch::rand({2});
    const auto found = error_of(init, sharded);
    const auto text = fmt::format("{} of {} {}", init.name, what, sharded.sizes().vec());
    if (found != wanted) wrong(fmt::format("{}: expected '{}', found '{}'", text, wanted, found));
    if (!at::equal(torch::rand({2}), next)) wrong(text + ": the random numbers behind it are others");
    // After a refusal, too: nothing has been written, or the same part.
    const auto values = whole_of(sharded);
    if (!at::equal(values, whole)) wrong(fmt::format("{}: {} elements differ", text, values.ne(whole).sum().item<int64_t>()));
    ++count_;
  }
  void wrong(const std::string& what) {
    is_right_ = false;
    fmt::print("rank {}: {}\n", rank_, what);
  }

  int rank_;
  Sample sample_{3};
  int64_t count_ = 0;
  bool is_right_ = true;
};

struct AllSizes : torch::nn::Module {
  AllSizes() {
    for (const auto& sizes : kSizes) {
      if (sizes.empty()) continue;
      handles.push_back(register_parameter(fmt::format("of{}", fmt::join(sizes, "x")), torch::zeros(sizes)));
    }
  }
  std::vector<Tensor> handles;
};

void compare_module(Comparison& comparison, const fsdp::FullyShardOptions& options, const std::string& what) {
  AllSizes module;
  fsdp::fully_shard(module, options);
  for (const auto& parameter : module.parameters()) comparison.compare(parameter, "parameter, " + what);
  for (const auto& handle : module.handles) comparison.compare(handle, "handle, " + what);
}

/// Cut by tensor parallelism along `dim`, then by data parallelism.
void compare_tensor_parallel(Comparison& comparison, const DeviceMesh& mesh, int64_t dim) {
  torch::nn::Module module;
  const auto tp = mesh["tp"];
  std::vector<std::vector<int64_t>> wholes;
  for (const auto& sizes : kSizes) {
    if (static_cast<int64_t>(sizes.size()) <= dim) continue;
    const int64_t size = sizes[static_cast<size_t>(dim)], chunk = (size + tp.size() - 1) / tp.size();
    const int64_t begin = std::min(tp.get_local_rank() * chunk, size);
    module.register_parameter(fmt::format("of{}", fmt::join(sizes, "x")),
                              torch::zeros(sizes).narrow(dim, begin, std::min(chunk, size - begin)).clone());
    wholes.push_back(sizes);
  }
  fsdp::FullyShardOptions options{.mesh = mesh, .dp_mesh_dims = fsdp::DataParallelMeshDims{.shard = "dp"}};
  size_t next = 0;
  options.tensor_parallel_fn = [&](const std::string&, const Tensor&) {
    return std::optional(fsdp::TensorParallel{{Shard{dim}}, wholes[next++]});
  };
  fsdp::fully_shard(module, options);
  for (const auto& parameter : module.parameters())
    comparison.compare(parameter, fmt::format("tensor-parallel parameter, cut along {}", dim));
}

void compare_dtensors(Comparison& comparison, const DeviceMesh& mesh, const std::vector<Placement>& placements) {
  for (const auto& sizes : kSizes) {
    const auto dims = std::max<int64_t>(1, static_cast<int64_t>(sizes.size()));
    const auto fits = [&](const Placement& placement) {
      const auto* shard = std::get_if<Shard>(&placement);
      return shard == nullptr || shard->dim < dims;
    };
    if (!std::ranges::all_of(placements, fits)) continue;
    const auto tensor = fsdp::distribute_tensor(torch::zeros(sizes), mesh, placements);
    comparison.compare(tensor, fsdp::to_string(placements));
  }
}

void compare_all(Comparison& comparison, const std::shared_ptr<fsdp::Communicator>& world) {
  const auto mesh = fsdp::init_device_mesh(world, {world->size()}, {"shard"});
  compare_module(comparison, {.mesh = mesh}, "one dimension");
  compare_module(comparison, {.mesh = mesh, .layout = fsdp::ParamLayout::kFlat}, "flat");
  compare_module(comparison, {.mesh = mesh, .shard_placement_fn = [](const std::string&, const Tensor& parameter) {
                   return Shard{parameter.dim() - 1};
                 }}, "the last dimension");
  for (const auto& placement : std::vector<Placement>{Shard{0}, Shard{1}, Shard{2}, Replicate{}})
    compare_dtensors(comparison, mesh, {placement});
  if (world->size() != 4) return;
  const auto square = fsdp::init_device_mesh(world, {2, 2}, {"dp", "tp"});
  compare_module(comparison, {.mesh = square}, "two dimensions");
  const std::vector<std::vector<Placement>> cuts = {
      {Replicate{}, Shard{0}},        {Shard{0}, Replicate{}}, {Shard{0}, Shard{0}},
      {StridedShard{0, 2}, Shard{0}}, {Shard{0}, Shard{1}},    {Shard{1}, Shard{0}}};
  for (const auto& placements : cuts) compare_dtensors(comparison, square, placements);
  for (const int64_t dim : {0, 1}) compare_tensor_parallel(comparison, square, dim);
}

}  // namespace

int run(int, char**) {
  try {
    const auto world = fsdp::init_process_group({.backend = "gloo"});
    Comparison comparison(world->rank());
    compare_all(comparison, world);
    fmt::print("{} compared\n", comparison.count());
    return comparison.is_right() ? 0 : 2;
  } catch (const std::exception& error) {
    const auto* of_libtorch = dynamic_cast<const c10::Error*>(&error);
    fmt::print("ended with: {}\n", of_libtorch != nullptr ? of_libtorch->what_without_backtrace() : error.what());
    return 1;
  }
}

}  // namespace fsdp::test::libtorch_init
