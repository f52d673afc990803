// Trains on the ranks that the launcher started; rank 1 does something of its own. Every rank then says
// in one block of text why it ended. Run by test_disagreements.py.
#include <fsdp/fsdp.hpp>

#include <torch/nn.h>
#include <torch/optim.h>

#include <cstdio>
#include <string>
#include <thread>

namespace fsdp::test::rank_disagreement {
namespace {

using std::chrono::milliseconds;

struct ModelImpl : torch::nn::Module {
  explicit ModelImpl(int64_t width) {
    for (int i = 0; i < 3; ++i)
      layers.push_back(register_module("layer" + std::to_string(i), torch::nn::Linear(width, width)));
    head = register_module("head", torch::nn::Linear(width, 1));
  }
  at::Tensor forward(at::Tensor x, int skipped) {
    for (int i = 0; i < 3; ++i)
      if (i != skipped) x = torch::tanh(layers[static_cast<size_t>(i)]->forward(x));
    return head->forward(x);
  }
  std::vector<torch::nn::Linear> layers;
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Model);

/// Of the ranks, which wait for each other so long on this machine (launch.patience).
milliseconds timeout() { return milliseconds(std::atoi(std::getenv("FSDP_TEST_TIMEOUT_MS"))); }

void train(const std::string& what) {
  const auto world = fsdp::init_process_group({.backend = "gloo", .timeout = timeout()});
  const bool is_odd = world->rank() == 1;
  const auto mesh = fsdp::init_device_mesh(world, {world->size()}, {"shard"});
  const int64_t width = is_odd && what == "shapes" ? 24 : 16;
  torch::manual_seed(1);
  {
    Model model(width);
    for (auto& layer : model->layers) fsdp::fully_shard(layer, {.mesh = mesh});
    const auto root = fsdp::fully_shard(model, {.mesh = mesh});
    fsdp::set_schedule_check(root, {.late_after = timeout() / 4, .compare_after = milliseconds(100)});
    torch::optim::SGD optimizer(model->parameters(), 0.01);
    const int steps = what == "agree" ? 20 : what == "ends" && is_odd ? 3 : 1000;
    for (int step = 0; step < steps; ++step) {
      const bool diverges = is_odd && step >= 3;
      if (diverges && what == "sleeps") std::this_thread::sleep_for(2 * timeout());
      if (diverges && what == "reads") {
        at::NoGradGuard no_grad;
        model->layers[2]->weight.norm();
      }
      if (diverges && what == "gradients")
        for (auto& parameter : model->layers[0]->parameters()) parameter.requires_grad_(false);
      const int skipped = what == "branches" ? (diverges ? 2 : 1) : what == "fewer" && diverges ? 1 : -1;
      const auto loss = model->forward(torch::ones({2, width}), skipped).square().sum();
      optimizer.zero_grad();
      loss.backward();
      optimizer.step();
    }
  }
  if (what == "ends") std::this_thread::sleep_for(timeout());
}

}  // namespace

int run(int argc, char** argv) {
  try {
    train(argc > 1 ? argv[1] : "");
  } catch (const fsdp::ScheduleError& error) {
    std::fprintf(stdout, "schedule: %s\n", error.what());
    return 3;
  } catch (const std::exception& error) {
    std::fprintf(stdout, "failed: %s\n", error.what());
    return 1;
  }
  return 0;
}

}  // namespace fsdp::test::rank_disagreement
