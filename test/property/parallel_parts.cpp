#include "property/parallel_parts.hpp"

#include <set>

#include "support/tensor_parallel_model.hpp"

namespace fsdp::test {
namespace {

namespace nn = torch::nn;
namespace F = torch::nn::functional;
using at::Tensor;

struct Columns : Node, SlicedPart {
  explicit Columns(const Part& p) : pieces(p.ranks) {
    up = register_module("up", nn::Linear(nn::LinearOptions(p.width, p.inner).bias(p.flag)));
    down = register_module("down", nn::Linear(nn::LinearOptions(p.inner, p.width).bias(false)));
    shift = register_parameter("shift", torch::randn({p.width}));
  }
  Tensor run(Tensor x, Inputs&) override {
    if (group == nullptr && pieces > 1) return in_pieces(x) + shift;
    const auto own = reinterpret_cast<int64_t>(group);
    const auto hidden = torch::tanh(up->forward(SplitUp::apply(x, own)));
    return SumOverRanks::apply(down->forward(hidden), own) + shift;
  }
  /// What the ranks do, one after another: adds up in the same dtype and order.
  Tensor in_pieces(const Tensor& x) {
    const auto copy = x.clone();  // so that the ranks' gradients are added up before any other
    Tensor sum;
    for (int64_t r = 0; r < pieces; ++r) {
      const auto bias = up->bias.defined() ? chunk(up->bias, 0, r, pieces) : Tensor();
      const auto hidden = torch::tanh(F::linear(copy, chunk(up->weight, 0, r, pieces), bias));
      const auto summand = F::linear(hidden, chunk(down->weight, 1, r, pieces));
      sum = sum.defined() ? sum + summand : summand;
    }
    return sum;
  }
  std::vector<Slice> slices() const override {
    std::vector<Slice> all{{.tensor = up->weight, .dim = 0}, {.tensor = down->weight, .dim = 1}};
    if (up->bias.defined()) all.push_back({.tensor = up->bias, .dim = 0});
    return all;
  }
  void cut(int64_t rank, int64_t ranks, Communicator* over) override {
    at::NoGradGuard no_grad;
    for (auto& slice : slices()) slice.tensor.set_data(chunk(slice.tensor, slice.dim, rank, ranks).clone());
    group = over;
  }
  int64_t pieces;
  Communicator* group = nullptr;  // the mesh's, which whoever cuts keeps
  nn::Linear up{nullptr}, down{nullptr};
  Tensor shift;
};

struct Experts : Node, SlicedPart {
  explicit Experts(const Part& p) : ranks_of_each(p.ranks_of_each) {
    up = register_parameter("up", torch::randn({p.ranks, p.width, p.inner}) * 0.4);
    down = register_parameter("down", torch::randn({p.ranks, p.inner, p.width}) * 0.4);
  }
  Tensor run(Tensor x, Inputs& in) override {
    const int64_t expert = is_cut ? 0 : in.rank / ranks_of_each;
    return x + torch::matmul(torch::tanh(torch::matmul(x, up[expert])), down[expert]);
  }
  std::vector<Slice> slices() const override {
    return {{.tensor = up, .is_expert = true}, {.tensor = down, .is_expert = true}};
  }
  void cut(int64_t rank, int64_t ranks, Communicator*) override {
    at::NoGradGuard no_grad;
    for (auto& slice : slices()) slice.tensor.set_data(chunk(slice.tensor, slice.dim, rank, ranks).clone());
    is_cut = true;
  }
  int64_t ranks_of_each;
  bool is_cut = false;
  Tensor up, down;
};

}  // namespace

Tensor chunk(const Tensor& whole, int64_t dim, int64_t rank, int64_t ranks) {
  const int64_t size = whole.size(dim), rows = (size + ranks - 1) / ranks;
  return whole.narrow(dim, std::min(rank * rows, size), chunk_of(size, rank, ranks)).contiguous();
}

std::shared_ptr<Node> build_columns(const Part& part) { return std::make_shared<Columns>(part); }
std::shared_ptr<Node> build_experts(const Part& part) { return std::make_shared<Experts>(part); }

std::vector<std::shared_ptr<SlicedPart>> sliced_parts(const nn::Module& module) {
  std::vector<std::shared_ptr<SlicedPart>> found;
  std::set<const nn::Module*> seen;
  for (const auto& below : module.modules(/*include_self=*/false))
    if (auto part = std::dynamic_pointer_cast<SlicedPart>(below); part && seen.insert(below.get()).second)
      found.push_back(std::move(part));
  return found;
}

}  // namespace fsdp::test
