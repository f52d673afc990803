// Trains one small model once for each row of a file of mixed-precision policies, through module
// boundaries, on the ranks that a launcher started; writes what each row gave.
// test_fsdp2_mixed_precision.py compares that with FSDP2 itself.
//
//   fsdp_test_ranks fsdp2_mixed FOLDER
//
// FOLDER holds rows.json, weights.bin (float64, parameters in order) and inputs.bin (float64, [rank,
// step, micro-batch, 4, width]); libfsdp_RANK.json is written there.

#include "rows.hpp"

#include "group/reduce/gradient_division.hpp"

namespace fsdp::test::fsdp2_mixed {
namespace {

constexpr int64_t kMicroBatches = 2;

/// What it multiplies by may be kept in float32: then it gives back what it got.
struct BlockImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    const auto h = down(torch::tanh(up(norm(x))));
    return x + (h * scale).to(x.scalar_type());
  }
  at::Tensor scale = register_parameter("scale", torch::ones({kWidth}));
  torch::nn::LayerNorm norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
  torch::nn::Linear up = register_module("up", torch::nn::Linear(kWidth, kInner));
  torch::nn::Linear down = register_module("down", torch::nn::Linear(kInner, kWidth));
};
TORCH_MODULE(Block);

struct NetImpl : torch::nn::Module {
  NetImpl() {
    for (int64_t i = 0; i < kBlocks; ++i) blocks->push_back(Block());
    register_module("blocks", blocks);
    head = register_module("head", torch::nn::Linear(kWidth, kOutputs));
  }
  at::Tensor forward(at::Tensor x) {
    x = in(x);
    for (auto& block : *blocks) x = fsdp::call(std::dynamic_pointer_cast<BlockImpl>(block), x);
    return head(x.to(head->weight.scalar_type()));
  }
  torch::nn::Linear in = register_module("in", torch::nn::Linear(kWidth, kWidth));
  torch::nn::ModuleList blocks;
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Net);

std::optional<at::ScalarType> dtype_of(const json& row, const std::string& key) {
  const std::map<std::string, at::ScalarType> dtypes{
      {"float32", at::kFloat}, {"bfloat16", at::kBFloat16}, {"float16", at::kHalf}};
  if (!row.contains(key)) return std::nullopt;
  return dtypes.at(row.at(key).get<std::string>());
}

fsdp::MixedPrecisionPolicy policy_of(const json& row) {
  fsdp::MixedPrecisionPolicy policy{.param_dtype = dtype_of(row, "param"),
                                    .reduce_dtype = dtype_of(row, "reduce"),
                                    .output_dtype = dtype_of(row, "output"),
                                    .cast_forward_inputs = row.value("cast_forward_inputs", true)};
  if (row.value("keep_scale", false))
    policy.param_dtype_override = [](const std::string& name, const at::Tensor& parameter) {
      return name == "scale" ? std::optional(parameter.scalar_type()) : std::nullopt;
    };
  return policy;
}

json train(const json& row, const fsdp::DeviceMesh& mesh, const at::Tensor& weights, const at::Tensor& inputs) {
  Net model;
  {
    torch::NoGradGuard no_grad;
    int64_t begin = 0;
    for (auto& parameter : model->parameters()) {
      parameter.copy_(weights.narrow(0, begin, parameter.numel()).view(parameter.sizes()));
      begin += parameter.numel();
    }
  }
  const fsdp::FullyShardOptions options{.mesh = mesh, .mp_policy = policy_of(row)};
  for (auto& block : *model->blocks) fsdp::fully_shard(*block, options);
  auto root = fsdp::fully_shard(model, options);
  for (auto& module : root.sharded_modules()) {
    if (row.contains("divide_factor")) module.set_gradient_divide_factor(row.at("divide_factor"));
    module.set_force_sum_reduction_for_comms(row.value("force_sum", false));
  }
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.125).momentum(0.5));
  const auto input_dtype = dtype_of(row, "input").value_or(at::kFloat);
  const int64_t micro_batches = row.value("accumulate", false) ? kMicroBatches : 1;
  json losses = json::array(), gradients = json::array(), final_weights = json::array();
  for (int64_t step = 0; step < inputs.size(0); ++step) {
    optimizer.zero_grad();
    for (int64_t micro = 0; micro < micro_batches; ++micro) {
      root.set_requires_gradient_sync(micro + 1 == micro_batches);
      auto loss = fsdp::call(model, inputs[step][micro].to(input_dtype)).to(at::kFloat).square().mean();
      loss.backward();
      losses.push_back(loss.item<float>());
    }
    json of_step = json::array();
    for (auto& parameter : model->parameters()) append(of_step, fsdp::full_grad(parameter));
    gradients.push_back(std::move(of_step));
    optimizer.step();
  }
  for (auto& parameter : model->parameters()) append(final_weights, fsdp::full_tensor(parameter));
  return {{"losses", losses}, {"gradients", gradients}, {"weights", final_weights}};
}

json divisions() {
  json all = json::array();
  for (int ranks = 1; ranks <= 64; ++ranks) {
    const auto division = fsdp::gradient_division(ranks, at::kHalf);
    all.push_back({division.before, division.after});
  }
  return all;
}

json results_of(const std::shared_ptr<fsdp::Communicator>& world, const json& rows, const at::Tensor& weights,
                const at::Tensor& all_inputs) {
  const auto mesh = fsdp::init_device_mesh(world, {world->size()}, {"shard"});
  const auto inputs = all_inputs.view({world->size(), -1, kMicroBatches, kBatch, kWidth})[world->rank()];
  json results = {{"divisions", divisions()}};
  for (const auto& row : rows) results[row.at("name").get<std::string>()] = train(row, mesh, weights, inputs);
  return results;
}

}  // namespace

int run(int argc, char** argv) { return run_rows(argc, argv, results_of); }

}  // namespace fsdp::test::fsdp2_mixed
