// What the pages of docs/ show in C++, as they show it: a test looks for each of their blocks here.
//
//   torchrun --nproc-per-node 2 --no-python build/examples/guides
#include <cstdio>
#include <filesystem>
#include <fsdp/fsdp.hpp>
#include <stdexcept>
#include <torch/torch.h>

namespace {

using World = std::shared_ptr<fsdp::Communicator>;

struct BlockImpl : torch::nn::Cloneable<BlockImpl> {
  BlockImpl() { reset(); }
  void reset() override {
    up = register_module("up", torch::nn::Linear(16, 32));
    down = register_module("down", torch::nn::Linear(32, 16));
  }
  torch::Tensor forward(const torch::Tensor& x) { return x + down->forward(torch::gelu(up->forward(x))); }
  torch::nn::Linear up{nullptr}, down{nullptr};
};
TORCH_MODULE(Block);

struct ModelImpl : torch::nn::Cloneable<ModelImpl> {
  ModelImpl() { reset(); }
  void reset() override {
    blocks = register_module("blocks", torch::nn::ModuleList());
    for (int i = 0; i < 3; ++i) blocks->push_back(Block());
    scale = register_parameter("scale", torch::ones({16}));
    head = register_module("head", torch::nn::Linear(16, 4));
  }
  torch::Tensor forward(torch::Tensor x) {
    for (const auto& block : *blocks) x = block->as<BlockImpl>()->forward(x);
    return head->forward(x * scale);
  }
  torch::nn::ModuleList blocks{nullptr};
  torch::Tensor scale;
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Model);

torch::Tensor loss_of(Model& model) { return model->forward(torch::randn({2, 16})).square().mean(); }

double train_one_step(Model& model) {
  loss_of(model).backward();
  return 1;
}

fsdp::FSDPModule shard(Model& model, const fsdp::FullyShardOptions& options) {
  for (auto& block : *model->blocks) fsdp::fully_shard(*block, options);
  return fsdp::fully_shard(model, options);
}

void require(bool holds, const char* what) {
  if (!holds) throw std::runtime_error(what);
}

void sharding(const World& world) {
  const auto mesh = fsdp::init_device_mesh(world, {world->size()}, {"shard"});
  {
    Model model;
    for (auto& block : *model->blocks) fsdp::fully_shard(*block, {.mesh = mesh});
    auto root = fsdp::fully_shard(model, {.mesh = mesh});
    require(root.sharded_modules().size() == 4, "four groups");
  }
  {
    Model model;
    auto plan = fsdp::plan_wrapping(*model, fsdp::wrap_class<BlockImpl>(), {.mesh = mesh});
    if (world->rank() == 0) std::printf("%s\n", plan.to_string().c_str());
    auto root = fsdp::apply_wrapping(plan);
    require(root.sharded_modules().size() == 4, "four units");
  }
  {
    Model model;
    fsdp::fully_shard(model, {.mesh = mesh,
                              .shard_placement_fn = [](const std::string& name, const at::Tensor&) {
                                return fsdp::Shard{name == "head.weight" ? 1 : 0};
                              }});
    fsdp::clone(model);
  }
  {
    Model model;
    fsdp::fully_shard(model, {.mesh = mesh, .layout = fsdp::ParamLayout::kFlat});
  }
  {
    Model model;
    fsdp::fully_shard(model, {.mesh = mesh, .replicated_params = {model->scale}});
  }
  Model model;
  auto root = shard(model, {.mesh = mesh});
  auto weight = model->head->weight;            // 4 x 16 on every rank
  auto local = fsdp::to_local(fsdp::sharded(weight));  // 2 x 16 on each of two ranks
  auto whole = fsdp::full_tensor(weight);       // 4 x 16, gathered: a collective call
  require(local.size(0) * world->size() == whole.size(0), "rows");
}

void evaluation(const World& world) {
  const auto mesh = fsdp::init_device_mesh(world, {world->size()}, {"shard"});
  Model model;
  auto root = shard(model, {.mesh = mesh});
  const auto input = torch::randn({2, 16});
  {
    torch::NoGradGuard no_grad;
    auto scope = fsdp::forward_scope(root);  // gathers along the learned order, and releases at its end
    auto output = model->forward(input);
  }
  {
    torch::NoGradGuard no_grad;
    fsdp::FullParameters scope(model);                 // all ranks
    model->head->weight.copy_(torch::zeros({4, 16}));  // the same on all ranks
  }
  require(fsdp::full_tensor(model->head->weight).count_nonzero().item<int64_t>() == 0, "written");
  Model average(fsdp::clone(model));  // sharded like the original
}

void mixed_precision(const World& world) {
  const auto mesh = fsdp::init_device_mesh(world, {world->size()}, {"shard"});
  Model model;
  fsdp::FullyShardOptions options{.mesh = mesh, .mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}};
  for (auto& block : *model->blocks) fsdp::fully_shard(*block, options);
  fsdp::fully_shard(model, options);
  auto output = fsdp::call(model, torch::randn({2, 16}));  // casts inputs to param_dtype, outputs to output_dtype
  require(output.dtype() == torch::kBFloat16, "bfloat16");
}

void memory(const World& world) {
  const auto mesh = fsdp::init_device_mesh(world, {world->size()}, {"shard"});
  {
    Model model;
    shard(model, {.mesh = mesh, .offload_policy = fsdp::CPUOffloadPolicy{}});
    train_one_step(model);
  }
  {
    Model model;
    auto root = shard(model, {.mesh = mesh});
    root.set_unsharded_byte_budget(1 << 20);
    train_one_step(model);
    train_one_step(model);
    require(root.report().budget_bytes == 1 << 20, "a budget");
  }
  Model model;
  shard(model, {.mesh = mesh});
  auto x = torch::randn({2, 16});
  for (const auto& block : *model->blocks)
    x = fsdp::activation_checkpoint(std::dynamic_pointer_cast<BlockImpl>(block), x);  // instead of block->forward(x)
  x.sum().backward();
}

void accumulation(const World& world) {
  const auto mesh = fsdp::init_device_mesh(world, {world->size()}, {"shard"});
  Model model;
  auto root = shard(model, {.mesh = mesh});
  const int micro_batches = 4;
  for (int i = 0; i < micro_batches; ++i) {
    root.set_requires_gradient_sync(i + 1 == micro_batches);
    (loss_of(model) / micro_batches).backward();
  }
  require(model->head->weight.grad().defined(), "a gradient");
}

void parallelism(const World& world) {
  {
    const auto mesh = fsdp::init_device_mesh(world, {1, world->size()}, {"replicate", "shard"});
    Model model;
    auto root = shard(model, {.mesh = mesh});
    root.set_all_reduce_hook(fsdp::bf16_compress, fsdp::Recurse::kYes);
    train_one_step(model);
  }
  {
    const auto mesh = fsdp::init_device_mesh(world, {world->size(), 1}, {"dp", "tp"});
    Model model;
    fsdp::fully_shard(model, {.mesh = mesh,
                              .dp_mesh_dims = fsdp::DataParallelMeshDims{.shard = "dp"},
                              .tensor_parallel_fn = [](const std::string& name, const at::Tensor&) {
                                std::optional<fsdp::TensorParallel> part;
                                if (name == "head.weight") part = {.placements = {fsdp::Shard{0}}};
                                return part;
                              }});
    train_one_step(model);
  }
  const auto mesh = fsdp::init_device_mesh(world, {world->size(), 1}, {"edp", "ep"});
  const auto all = mesh.flatten("dp");
  Model model;
  const auto is_expert = [](const std::string& name) { return name.starts_with("blocks.0."); };
  fsdp::fully_shard(model, {.mesh = all,
                            .shard_placement_fn = [&](const std::string& name, const at::Tensor&) {
                              if (!is_expert(name)) return fsdp::ShardPlacementResult{};
                              return fsdp::ShardPlacementResult(fsdp::Shard{0}, mesh["edp"], mesh["ep"]);
                            }});
  train_one_step(model);
}

void meta(const World& world) {
  const auto mesh = fsdp::init_device_mesh(world, {world->size()}, {"shard"});
  auto model = [] {
    fsdp::MetaDevice meta;
    return Model();
  }();
  for (auto& block : *model->blocks) fsdp::fully_shard(*block, {.mesh = mesh});
  fsdp::fully_shard(model, {.mesh = mesh});
  // LibTorch's own classes are known. A class with parameters of its own says what they begin with.
  const auto scales = fsdp::initializer<ModelImpl>([](ModelImpl& module, fsdp::Initializer& init) { init.ones_(module.scale); });
  fsdp::materialize(model, {.seed = 1, .initializers = {scales}});
  require(fsdp::full_tensor(model->scale).sum().item<double>() == 16, "ones");
}

void checkpoints(const World& world) {
  const auto mesh = fsdp::init_device_mesh(world, {world->size()}, {"shard"});
  Model model;
  shard(model, {.mesh = mesh});
  torch::optim::AdamW optimizer(model->parameters());
  train_one_step(model);
  optimizer.step();
  const auto run = (std::filesystem::temp_directory_path() / "fsdp-guides").string();

  fsdp::save_checkpoint(run + "/step-100", {model, optimizer, R"({"epoch": 2})"}, {.world = world, .keep_last = 3});
  std::string extra;
  if (auto path = fsdp::latest_checkpoint(run))
    extra = fsdp::load_checkpoint(*path, {model, optimizer}, {.world = world}).extra;
  require(extra == R"({"epoch": 2})", "extra");

  auto full = fsdp::state_dict(model, {.rank0_only = true, .cpu_offload = true});  // by the plain module's names
  fsdp::load_state_dict(model, full, {.broadcast_from_rank0 = true});
  require((full.find("head.weight") != nullptr) == (world->rank() == 0), "rank 0 alone has it");
  world->start_all_reduce(torch::zeros({1}), fsdp::ReduceOp::kSum, "all have read")->wait();
  if (world->rank() == 0) std::filesystem::remove_all(run);
}

void optimizers(const World& world) {
  const auto mesh = fsdp::init_device_mesh(world, {world->size()}, {"shard"});
  {
    Model model;
    torch::optim::AdamW optimizer(model->parameters());  // before fully_shard
    shard(model, {.mesh = mesh});
    fsdp::adopt(optimizer);
    train_one_step(model);
    optimizer.step();
  }
  Model model;
  auto root = shard(model, {.mesh = mesh});
  std::vector<at::Tensor> tensors;
  for (auto& local : fsdp::local_shards(*model)) tensors.push_back(local.shard);
  torch::optim::AdamW optimizer(tensors);
  loss_of(model).backward();
  fsdp::clip_grad_norm_(tensors, 1.0);
  optimizer.step();
}

void pipelines(const World& world) {
  const auto mesh = fsdp::init_device_mesh(world, {world->size()}, {"shard"});
  Model first, second;
  auto one = shard(first, {.mesh = mesh}), other = shard(second, {.mesh = mesh});
  fsdp::share_comm_ctx({one, other});  // stages of one rank count packed gradients together
  for (auto* root : {&one, &other}) root->set_manual_backward_finalization(true);
  for (int micro_batch = 0; micro_batch < 3; ++micro_batch) {
    loss_of(first).backward();
    loss_of(second).backward();
  }
  for (auto* root : {&one, &other}) root->finalize_backward();
  require(first->head->weight.grad().defined(), "a gradient");
}

struct Tracing : fsdp::AllGatherComm {
  std::shared_ptr<fsdp::Work> start_all_gather(const at::Tensor& output, const at::Tensor& input, fsdp::Communicator& group,
                                               std::string_view subject) override {
    std::printf("gathers %.*s: %ld bytes\n", static_cast<int>(subject.size()), subject.data(), static_cast<long>(output.numel()));
    return AllGatherComm::start_all_gather(output, input, group, subject);
  }
};

void extensions(const World& world) {
  const auto mesh = fsdp::init_device_mesh(world, {world->size()}, {"shard"});
  {
    Model model;
    const auto int8 = fsdp::int8_all_gather(/*block_numel=*/128);
    fsdp::fully_shard(model, {.mesh = mesh,
                              .all_gather_extension_fn = [int8](const std::string& name, const at::Tensor&) {
                                return name.ends_with("weight") ? int8 : nullptr;
                              }});
    train_one_step(model);
  }
  Model model;
  auto root = shard(model, {.mesh = mesh});
  root.set_custom_all_gather(std::make_shared<Tracing>());
  train_one_step(model);
}

void communication(const World& world) {
  const auto mesh = fsdp::init_device_mesh(world, {world->size()}, {"shard"});
  Model model;
  auto root = shard(model, {.mesh = mesh});
  root.set_separate_reduce_scatter_group();
  root.set_prefetch_distance(1);
  root.set_reduce_scatter_max_input_buffers(2);  // one more than groups are gathered ahead
  root.choose_reduce_scatter_start([&] { return train_one_step(model); });
}

void inspection(const World& world) {
  const auto mesh = fsdp::init_device_mesh(world, {world->size()}, {"shard"});
  Model model;
  auto root = shard(model, {.mesh = mesh});
  const auto folder = std::filesystem::temp_directory_path().string();
  for (int step = 0; step < 2; ++step) train_one_step(model);

  fsdp::start_timeline(root);
  train_one_step(model);
  fsdp::stop_timeline(root).write(folder + "/rank" + std::to_string(world->rank()) + ".json");

  if (world->rank() == 0) std::printf("%s\n", root.report().to_string().c_str());
  std::filesystem::remove(folder + "/rank" + std::to_string(world->rank()) + ".json");
}

void checks(const World& world) {
  const auto mesh = fsdp::init_device_mesh(world, {world->size()}, {"shard"});
  Model model;
  fsdp::fully_shard(model, {.mesh = mesh, .sanitizer = fsdp::SanitizerOptions{}});
  for (auto& root : fsdp::roots(*model)) fsdp::set_schedule_check(root, {.late_after = std::chrono::seconds(10)});
  train_one_step(model);
}

void from_fsdp1(const World& world) {
  const auto mesh = fsdp::init_device_mesh(world, {world->size()}, {"shard"});
  Model model;
  fsdp::fully_shard_fsdp1(model, fsdp::wrap_by_size({.min_numel = 500}),
                          {.sharding_strategy = fsdp::ShardingStrategy::kShardGradOp,
                           .mesh = mesh,
                           .sync_module_states = true},
                          [](fsdp::FullyShardOptions& options) { options.mp_policy.param_dtype = at::kBFloat16; });
  train_one_step(model);
}

}  // namespace

int main() {
  const auto world = fsdp::init_process_group();
  try {
    for (auto guide : {sharding, evaluation, mixed_precision, memory, accumulation, parallelism, meta, checkpoints, optimizers,
                       pipelines, extensions, communication, inspection, checks, from_fsdp1}) {
      torch::manual_seed(1);  // the same first values on all ranks
      guide(world);
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "guides: %s\n", error.what());
    return 1;
  }
  std::printf("rank %d: all guides ran\n", world->rank());
}
