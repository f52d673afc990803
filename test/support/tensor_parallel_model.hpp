#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "support/models.hpp"

namespace fsdp::test {

inline at::Tensor all_reduced(const at::Tensor& tensor, Communicator* group) {
  auto sum = tensor.clone(at::MemoryFormat::Contiguous);
  if (group != nullptr && group->size() > 1) group->start_all_reduce(sum, ReduceOp::kSum, "tensor parallel")->wait();
  return sum;
}

/// Summands of a value on all ranks, which then all go on with it.
struct SumOverRanks : torch::autograd::Function<SumOverRanks> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& summand, int64_t group) {
    return all_reduced(summand, reinterpret_cast<Communicator*>(group));
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*, torch::autograd::variable_list grads) {
    return {grads[0], at::Tensor()};
  }
};

/// A value that all ranks have, and each goes on with by itself: the gradients are summands.
struct SplitUp : torch::autograd::Function<SplitUp> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& value, int64_t group) {
    context->saved_data["group"] = group;
    return value.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, torch::autograd::variable_list grads) {
    return {all_reduced(grads[0], reinterpret_cast<Communicator*>(context->saved_data["group"].toInt())), at::Tensor()};
  }
};

/// Of `size` rows, those of a rank: chunks of ceil(n / ranks).
inline int64_t chunk_of(int64_t size, int64_t rank, int64_t ranks) {
  const int64_t chunk = (size + ranks - 1) / ranks;
  return std::clamp<int64_t>(size - rank * chunk, 0, chunk);
}

/// Norm, then a linear layer cut by columns (of the product: rows of its weight), gelu, and one cut by rows.
struct TpMlpImpl : torch::nn::Cloneable<TpMlpImpl> {
  TpMlpImpl(int64_t width, int64_t hidden, Communicator* group) : width(width), hidden(hidden), group(group) { reset(); }
  void reset() override {
    const int64_t local = group != nullptr ? chunk_of(hidden, group->rank(), group->size()) : hidden;
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    up = register_module("up", torch::nn::Linear(width, local));
    // LibTorch's first values divide by the number of columns.
    down = register_module("down", torch::nn::Linear(torch::nn::LinearOptions(std::max<int64_t>(local, 1), width).bias(false)));
    if (local == 0) down->weight.set_data(torch::empty({width, 0}));
    bias = register_parameter("bias", torch::randn({width}));
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto own = reinterpret_cast<int64_t>(group);
    const auto y = SplitUp::apply(norm->forward(x), own);
    return x + SumOverRanks::apply(down->forward(torch::gelu(up->forward(y))), own) + bias;
  }
  int64_t width, hidden;
  Communicator* group;
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear up{nullptr}, down{nullptr};
  at::Tensor bias;
};
TORCH_MODULE(TpMlp);

struct TpNetImpl : torch::nn::Cloneable<TpNetImpl> {
  TpNetImpl(int64_t width, int64_t hidden, Communicator* group) : width(width), hidden(hidden), group(group) { reset(); }
  void reset() override {
    layers = register_module("layers", torch::nn::ModuleList());
    for (int i = 0; i < 2; ++i) layers->push_back(TpMlp(width, hidden, group));
    head = register_module("head", torch::nn::Linear(width, 3));
    scale = register_parameter("scale", torch::full({}, 1.25));
  }
  at::Tensor loss(int rank, int step) {
    Inputs in(rank, step);
    auto x = in.normal({3, width});
    for (const auto& layer : *layers) x = layer->as<TpMlpImpl>()->forward(x);
    return (head->forward(x) * scale).square().mean();
  }
  int64_t width, hidden;
  Communicator* group;
  torch::nn::ModuleList layers{nullptr};
  torch::nn::Linear head{nullptr};
  at::Tensor scale;
};
TORCH_MODULE(TpNet);

/// The dimension that tensor parallelism cuts; none: whole on all its ranks.
inline std::optional<int64_t> cut_dim(const std::string& name) {
  if (name.ends_with("up.weight") || name.ends_with("up.bias")) return 0;
  if (name.ends_with("down.weight")) return 1;
  return std::nullopt;
}

enum class Says { kMesh, kDims };  ///< which mesh is tensor-parallel: by itself, or by dp_mesh_dims

struct TpCase {
  std::vector<int64_t> shape;  ///< (dp, tp), or (replicate, shard, tp)
  int64_t width = 6, hidden = 8;
  Says says = Says::kDims;
  std::optional<int64_t> dim = {};  ///< along which data parallelism cuts; none: 0
  ParamLayout layout = ParamLayout::kPerParameter;
  std::optional<double> max_norm = {};
  bool is_merged = false;  ///< both data-parallel dimensions shard
  ReshardAfterForward reshard = {};
  bool replicates_some = false;

  int ranks() const {
    int64_t all = 1;
    for (const auto size : shape) all *= size;
    return static_cast<int>(all);
  }
  int data_parallel() const { return ranks() / static_cast<int>(shape.back()); }
  std::string text() const {
    return fmt::format("({}), width {}, hidden {}, says {}, dim {}, flat {}, merged {}, replicates {}", fmt::join(shape, ", "),
                       width, hidden, static_cast<int>(says), dim.value_or(-9), layout == ParamLayout::kFlat, is_merged,
                       replicates_some);
  }
};

struct TpModel {
  TpModel(const Rank& rank, const TpCase& c, uint64_t seed = 21)
      : mesh(init_device_mesh(rank.world(), c.shape,
                              c.shape.size() == 2 ? std::vector<std::string>{"dp", "tp"}
                                                  : std::vector<std::string>{"replicate", "shard", "tp"})),
        tp(mesh["tp"]),
        batch(rank.index() / static_cast<int>(c.shape.back())),
        plain(seeded(seed, [&] { return TpNet(c.width, c.hidden, nullptr); })),
        model(seeded(1, [&] { return TpNet(c.width, c.hidden, tp.get_group().get()); })) {
    at::NoGradGuard no_grad;
    const auto from = plain->named_parameters();
    for (auto& param : model->named_parameters()) param.value().copy_(local_of(param.key(), from[param.key()].detach()));
  }

  at::Tensor local_of(const std::string& name, const at::Tensor& whole) const {
    const auto dim = cut_dim(name);
    if (!dim) return whole;
    const int64_t size = whole.size(*dim), ranks = tp.size(), chunk = (size + ranks - 1) / ranks;
    const int64_t begin = std::min(tp.get_local_rank() * chunk, size);
    return whole.narrow(*dim, begin, chunk_of(size, tp.get_local_rank(), ranks));
  }

  FullyShardOptions options(const TpCase& c) const {
    FullyShardOptions options{.mesh = mesh, .reshard_after_forward = c.reshard, .layout = c.layout};
    const bool is_hybrid = c.shape.size() == 3;
    if (c.says == Says::kDims) {
      options.dp_mesh_dims = !is_hybrid   ? DataParallelMeshDims{.shard = "dp"}
                             : c.is_merged ? DataParallelMeshDims{.shard = {"replicate", "shard"}}
                                           : DataParallelMeshDims{.shard = "shard", .replicate = "replicate"};
    } else {
      options.mesh = is_hybrid ? mesh.submesh({"replicate", "shard"}) : mesh["dp"];
    }
    options.tensor_parallel_fn = [c, says = c.says, tp = tp](const std::string& name, const at::Tensor& parameter) -> std::optional<TensorParallel> {
      const auto dim = cut_dim(name);
      if (!dim && says == Says::kDims) return std::nullopt;  // the same on all ranks
      TensorParallel part{.placements = {Replicate{}}, .sizes = parameter.sizes().vec()};
      if (dim) {
        part.placements = {Shard{*dim - parameter.dim()}};
        part.sizes[static_cast<size_t>(*dim)] = c.hidden;
      }
      if (says == Says::kMesh) part.mesh = tp;
      return part;
    };
    if (c.dim)
      options.shard_placement_fn = [dim = *c.dim](const std::string&, const at::Tensor& parameter) {
        return Shard{parameter.dim() > 0 ? dim % parameter.dim() : 0};
      };
    return options;
  }
  FSDPModule shard(const TpCase& c, FullyShardOptions options) const {
    if (c.replicates_some)
      for (const auto& layer : *model->layers) {
        options.replicated_params.push_back(layer->as<TpMlpImpl>()->up->weight);
        options.replicated_params.push_back(layer->as<TpMlpImpl>()->bias);
      }
    for (const auto& layer : *model->layers) fully_shard(*layer, options);
    return fully_shard(model, options);
  }
  FSDPModule shard(const TpCase& c) const { return shard(c, options(c)); }

  DeviceMesh mesh, tp;
  int batch;  ///< whose batch this rank sees: tensor-parallel ranks the same one
  TpNet plain, model;
};

/// The plain model's gradients, averaged over the data-parallel ranks' batches.
inline std::vector<at::Tensor> plain_backward(TpNet& plain, int ranks, int step) {
  std::vector<at::Tensor> losses;
  plain->zero_grad();
  for (int rank = 0; rank < ranks; ++rank) {
    losses.push_back(plain->loss(rank, step));
    losses.back().backward();
  }
  for (auto& param : plain->parameters()) param.mutable_grad().div_(ranks);
  return losses;
}

inline void check_weights(const Rank& rank, const TpNet& model, const TpNet& plain, const std::string& what, bool is_flat = false) {
  const auto expected = plain->named_parameters();
  for (const auto& param : model->named_parameters()) {
    rank.check_close(full_tensor(param.value()), expected[param.key()].detach(), what + param.key());
    if (is_flat) continue;
    const auto whole = dtensor_of(param.value());
    rank.check(whole.sizes() == expected[param.key()].sizes(), what + "sizes of " + param.key());
    rank.check_close(whole.full_tensor(), expected[param.key()].detach(), what + "DTensor of " + param.key());
    rank.check(whole.element_ranges() == local_ranges(param.value()), what + "ranges of " + param.key());
  }
}

}  // namespace fsdp::test
