// Trains one small model once for each row of a file of FSDP1 arguments, translated, on the ranks that
// a launcher started; writes what each row gave. test_fsdp1.py compares that with FSDP1 itself.
//
//   fsdp_test_ranks fsdp1_rows FOLDER
//
// FOLDER holds rows.json, weights.bin (float64, parameters in order) and inputs.bin (float64, [rank,
// step, 4, width]); libfsdp_RANK.json is written there.

#include <algorithm>
#include <cstdlib>

#include "rows.hpp"

namespace fsdp::test::fsdp1_rows {
namespace {

/// A linear layer that may begin on the meta device.
struct DenseImpl : torch::nn::Module {
  DenseImpl(int64_t in, int64_t out, c10::Device device) {
    const auto options = torch::TensorOptions().dtype(torch::kDouble).device(device);
    weight = register_parameter("weight", torch::empty({out, in}, options));
    bias = register_parameter("bias", torch::empty({out}, options));
  }
  at::Tensor forward(const at::Tensor& x) { return torch::linear(x, weight, bias); }
  void allocate() {
    for (auto* member : {&weight, &bias}) *member = torch::empty(member->sizes(), torch::kDouble).requires_grad_();
    parameters_["weight"] = weight;
    parameters_["bias"] = bias;
  }
  at::Tensor weight, bias;
};
TORCH_MODULE(Dense);

/// What mixed precision may leave alone: a part of it computes without parameters.
struct DownImpl : DenseImpl {
  using DenseImpl::DenseImpl;
  at::Tensor forward(const at::Tensor& x) {
    return DenseImpl::forward(x * torch::rsqrt(x.square().mean(-1, /*keepdim=*/true) + 0.1));
  }
};
TORCH_MODULE(Down);

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(c10::Device device)
      : up(register_module("up", Dense(kWidth, kInner, device))),
        down(register_module("down", Down(kInner, kWidth, device))) {}
  at::Tensor forward(const at::Tensor& x) { return x + fsdp::call(down, torch::tanh(up(x))); }
  Dense up;
  Down down;
};
TORCH_MODULE(Block);

struct NetImpl : torch::nn::Module {
  explicit NetImpl(c10::Device device) {
    in = register_module("in", Dense(kWidth, kWidth, device));
    for (int64_t i = 0; i < kBlocks; ++i) blocks->push_back(Block(device));
    register_module("blocks", blocks);
    head = register_module("head", Dense(kWidth, kOutputs, device));
  }
  at::Tensor forward(at::Tensor x) {
    x = in(x);
    for (auto& block : *blocks) x = block->as<BlockImpl>()->forward(x);
    return head(x);
  }
  Dense in{nullptr}, head{nullptr};
  torch::nn::ModuleList blocks;
};
TORCH_MODULE(Net);

/// Fills the parameters of `module` (all below it too) with their part of the whole model's weights.
void load_weights(torch::nn::Module& model, torch::nn::Module& module, const at::Tensor& weights) {
  torch::NoGradGuard no_grad;
  std::map<const c10::TensorImpl*, bool> wanted;
  for (auto& parameter : module.parameters()) wanted[parameter.unsafeGetTensorImpl()] = true;
  int64_t begin = 0;
  for (auto& parameter : model.parameters()) {
    if (wanted.count(parameter.unsafeGetTensorImpl()))
      parameter.copy_(weights.narrow(0, begin, parameter.numel()).view(parameter.sizes()));
    begin += parameter.numel();
  }
}

fsdp::Fsdp1Options options_of(const json& row, const fsdp::DeviceMesh& hybrid) {
  using enum fsdp::ShardingStrategy;
  using enum fsdp::BackwardPrefetch;
  const std::map<std::string, fsdp::ShardingStrategy> strategies{{"FULL_SHARD", kFullShard},
                                                                 {"SHARD_GRAD_OP", kShardGradOp},
                                                                 {"NO_SHARD", kNoShard},
                                                                 {"HYBRID_SHARD", kHybridShard},
                                                                 {"_HYBRID_SHARD_ZERO2", kHybridShardZero2}};
  const std::map<std::string, fsdp::BackwardPrefetch> prefetches{
      {"BACKWARD_PRE", kPre}, {"BACKWARD_POST", kPost}, {"None", kNone}};
  fsdp::Fsdp1Options options;
  options.sharding_strategy = strategies.at(row.value("sharding_strategy", "FULL_SHARD"));
  options.backward_prefetch = prefetches.at(row.value("backward_prefetch", "BACKWARD_PRE"));
  options.forward_prefetch = row.value("forward_prefetch", false);
  options.limit_all_gathers = row.value("limit_all_gathers", true);
  options.sync_module_states = row.value("sync_module_states", false);
  options.use_orig_params = row.value("use_orig_params", false);
  options.cpu_offload = row.value("cpu_offload", false);
  // On a mesh of CPUs nothing would be copied.
  ::setenv("FSDP_COPY_ON_CPU", options.cpu_offload ? "1" : "0", /*overwrite=*/1);
  if (row.value("device_id", false)) options.device_id = c10::Device(torch::kCPU);
  if (row.value("mesh_2d", false)) options.mesh = hybrid;
  return options;
}

/// The mesh over this rank's process group; of a pair of them, (replicate, shard).
fsdp::DeviceMesh mesh_of(const json& row, const std::shared_ptr<fsdp::Communicator>& world) {
  const auto groups = row.at("process_group").get<std::vector<std::vector<int>>>();
  if (row.value("is_pair", false))
    return fsdp::init_device_mesh(world, {static_cast<int64_t>(groups.size()), static_cast<int64_t>(groups[0].size())},
                                  {"replicate", "shard"});
  std::shared_ptr<fsdp::Communicator> own;
  for (const auto& ranks : groups)
    if (auto made = world->split(ranks, "process_group")) own = std::move(made);
  return fsdp::init_device_mesh(own, {own->size()}, {"shard"});
}

fsdp::WrapPolicy policy_of(const std::string& name) {
  if (name == "by size") return fsdp::wrap_by_size({.min_numel = 100});
  if (name == "by a smaller size") return fsdp::wrap_by_size({.min_numel = 50});
  if (name == "a function")
    return fsdp::wrap_if([](const fsdp::WrapCandidate& candidate) {
      return dynamic_cast<const DenseImpl*>(&candidate.module) != nullptr && candidate.numel > 50;
    });
  if (name == "CustomPolicy") return fsdp::wrap_class<DownImpl>();
  if (name == "None") return fsdp::wrap_if([](const fsdp::WrapCandidate&) { return false; });
  return fsdp::wrap_class<BlockImpl>();
}

std::shared_ptr<torch::nn::Module> module_at(torch::nn::Module& root, const std::string& name) {
  for (const auto& module : root.named_modules())
    if (module.key() == name) return module.value();
  return nullptr;
}

/// Without those that fully_shard was told to ignore.
std::vector<at::Tensor> sharded_of(std::vector<at::Tensor> parameters) {
  std::erase_if(parameters, [](const at::Tensor& parameter) { return !fsdp::is_fsdp_parameter(parameter); });
  return parameters;
}

/// ignored_states are modules or parameters.
void leave_alone(const json& row, torch::nn::Module& model, fsdp::FullyShardOptions& options) {
  for (const auto* argument : {"ignored_modules", "ignored_states"})
    for (const auto& name : row.value(argument, std::vector<std::string>())) {
      if (auto module = module_at(model, name))
        options.ignored_modules.push_back(std::move(module));
      else
        options.ignored_params.push_back(model.named_parameters()[name]);
    }
}

json train(const json& row, const std::shared_ptr<fsdp::Communicator>& world, const fsdp::DeviceMesh& hybrid,
           const at::Tensor& weights, const at::Tensor& inputs) {
  const int rank = world->rank();
  auto options = options_of(row, hybrid);
  if (row.contains("process_group")) options.mesh = mesh_of(row, world);
  const bool from_meta = row.value("param_init_fn", false);
  Net model(c10::Device(from_meta ? torch::kMeta : torch::kCPU));
  if (from_meta) {
    options.param_init_fn = [&](torch::nn::Module& module) {
      dynamic_cast<DenseImpl&>(module).allocate();
      load_weights(*model, module, weights);
    };
  } else {
    // Without synchronisation all ranks begin alike.
    load_weights(*model, *model, options.sync_module_states ? weights + rank : weights);
  }
  const bool has_exempt = row.value("exempt", false);
  if (has_exempt) model->to(torch::kFloat);
  const auto policy = policy_of(row.value("auto_wrap_policy", ""));
  const auto root = fsdp::fully_shard_fsdp1(model, policy, options, [&](fsdp::FullyShardOptions& more) {
    leave_alone(row, *model, more);
    if (!has_exempt) return;
    more.mp_policy = {.param_dtype = torch::kBFloat16,
                      .reduce_dtype = torch::kFloat,
                      .is_exempt = [](const torch::nn::Module& module) { return dynamic_cast<const DownImpl*>(&module) != nullptr; }};
  });
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-2));
  json losses = json::array(), norms = json::array(), final_weights = json::array();
  for (int64_t step = 0; step < inputs.size(1); ++step) {
    auto loss = model->forward(inputs[rank][step]).square().mean();
    optimizer.zero_grad();
    loss.backward();
    norms.push_back(fsdp::clip_grad_norm_(sharded_of(model->parameters()), 0.5));
    optimizer.step();
    losses.push_back(loss.item<double>());
  }
  for (auto& parameter : model->parameters())
    append(final_weights, fsdp::is_fsdp_parameter(parameter) ? fsdp::dtensor_of(parameter).full_tensor() : parameter.detach());
  return {{"losses", losses}, {"norms", norms}, {"weights", final_weights}};
}

json results_of(const std::shared_ptr<fsdp::Communicator>& world, const json& rows, const at::Tensor& weights,
                const at::Tensor& all_inputs) {
  const int size = world->size();
  fsdp::DeviceMesh hybrid;
  if (size > 2) hybrid = fsdp::init_device_mesh(world, {2, size / 2}, {"replicate", "shard"});
  const auto inputs = all_inputs.view({size, -1, kBatch, kWidth});
  json results = json::object();
  for (const auto& row : rows) {
    const auto name = row.at("name").get<std::string>();
    try {
      results[name] = train(row, world, hybrid, weights, inputs);
    } catch (const fsdp::UsageError& error) {
      results[name] = {{"refused", error.what()}};  // by all ranks alike
    }
  }
  return results;
}

}  // namespace

int run(int argc, char** argv) { return run_rows(argc, argv, results_of); }

}  // namespace fsdp::test::fsdp1_rows
