#include "bench_models.hpp"

#include "fsdp/dtensor.hpp"

namespace fsdp::bench {

MlpBlockImpl::MlpBlockImpl(const MlpSizes& sizes)
    : norm(register_module("norm", torch::nn::LayerNorm(std::vector<int64_t>{sizes.dim}))),
      up(register_module("up", torch::nn::Linear(sizes.dim, sizes.hidden))),
      down(register_module("down", torch::nn::Linear(sizes.hidden, sizes.dim))) {}

at::Tensor MlpBlockImpl::forward(const at::Tensor& x) {
  return x + down(torch::gelu(up(norm(x))));
}

MlpModelImpl::MlpModelImpl(const MlpSizes& sizes)
    : embedding(register_module("embedding", torch::nn::Embedding(sizes.vocabulary, sizes.dim))),
      blocks(register_module("blocks", torch::nn::ModuleList())),
      norm(register_module("norm", torch::nn::LayerNorm(std::vector<int64_t>{sizes.dim}))),
      head(register_module("head", torch::nn::Linear(sizes.dim, sizes.vocabulary))) {
  for (int64_t i = 0; i < sizes.blocks; ++i) blocks->push_back(MlpBlock(sizes));
}

at::Tensor MlpModelImpl::loss(const at::Tensor& tokens) {
  at::Tensor x = embedding(tokens);
  for (const auto& block : *blocks) x = block->as<MlpBlock>()->forward(x);
  return torch::cross_entropy_loss(head(norm(x)), tokens);
}

FSDPModule shard(MlpModel& model, const DeviceMesh& mesh, bool reshard_after_forward) {
  for (const auto& block : *model->blocks)
    fully_shard(*block, {.mesh = mesh, .reshard_after_forward = reshard_after_forward});
  return fully_shard(model, {.mesh = mesh, .reshard_after_forward = false});
}

int64_t parameter_bytes(const torch::nn::Module& module) {
  int64_t bytes = 0;
  for (const auto& parameter : module.parameters()) bytes += static_cast<int64_t>(to_local(parameter).nbytes());
  return bytes;
}

}  // namespace fsdp::bench
