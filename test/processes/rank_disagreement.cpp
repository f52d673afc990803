// Trains on the ranks that the launcher started; rank 1 does something of its own. Every rank then says
// in one block of text why it ended. Run by test_disagreements.py.
#include <fsdp/fsdp.hpp>

#include <torch/optim.h>

#include <cstdlib>
#include <string>
#include <thread>

#include "rank_chain.hpp"

namespace fsdp::test::rank_disagreement {
namespace {

using std::chrono::milliseconds;

/// Of the ranks, which wait for each other so long on this machine (launch.patience).
milliseconds timeout() { return milliseconds(std::atoi(std::getenv("FSDP_TEST_TIMEOUT_MS"))); }

void train(const std::string& what) {
  const auto world = fsdp::init_process_group({.backend = "gloo", .timeout = timeout()});
  const bool is_odd = world->rank() == 1;
  const auto mesh = fsdp::init_device_mesh(world, {world->size()}, {"shard"});
  const int64_t width = is_odd && what == "shapes" ? 24 : 16;
  torch::manual_seed(1);
  {
    RankChain model(width);
    for (auto& layer : model->layers) fsdp::fully_shard(layer, {.mesh = mesh});
    const auto root = fsdp::fully_shard(model, {.mesh = mesh});
    fsdp::set_schedule_check(root, {.late_after = timeout() / 4, .compare_after = milliseconds(100)});
    torch::optim::SGD optimizer(model->parameters(), 0.01);
    const int steps = what == "agree" ? 20 : what == "ends" && is_odd ? 3 : 1000;
    for (int step = 0; step < steps; ++step) {
      const bool diverges = is_odd && step >= 3;
      if (diverges && (what == "sleeps" || what == "does not come")) std::this_thread::sleep_for(2 * timeout());
      if ((diverges && what == "alone") || (step == 3 && what == "does not come"))
        fsdp::full_tensor(model->layers[2]->parameters()[0]);
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
  return end_of_rank([&] { train(argc > 1 ? argv[1] : ""); });
}

}  // namespace fsdp::test::rank_disagreement
