// Trains, and saves in the background, on ranks whose network a test breaks meanwhile. Each says in lines where it is and what
// came of it: `step 3`; `at forward 3`, where it waits for a line; `result 1f3a`, or in one block of text why it ended. Run by
// test_faults.py.
#include <fsdp/fsdp.hpp>

#include <fmt/format.h>
#include <torch/optim.h>

#include <cstdio>
#include <filesystem>
#include <iostream>
#include <map>
#include <stdexcept>
#include <string>

#include "base/stable_hash.hpp"
#include "rank_chain.hpp"

namespace fsdp::test::network_faults {
namespace {

/// `name=value`, each with a default.
class Settings {
 public:
  Settings(int argc, char** argv) {
    for (int i = 1; i < argc; ++i) {
      const std::string text = argv[i];
      const auto split = text.find('=');
      if (split == std::string::npos || !values_.contains(text.substr(0, split)))
        throw std::invalid_argument("unknown setting " + text);
      values_[text.substr(0, split)] = text.substr(split + 1);
    }
  }
  const std::string& text(const std::string& name) const { return values_.at(name); }
  int number(const std::string& name) const { return std::stoi(values_.at(name)); }

 private:
  std::map<std::string, std::string> values_ = {
      {"steps", "12"},
      {"width", "256"},
      {"timeout_ms", "4000"},
      {"reshard", "1"},         // 0: backward gathers nothing
      {"compare_every", "0"},   // 1: the schedule check compares before every collective
      {"disagree_at", "-1"},    // from this step on rank 1 skips a layer
      {"save_into", ""},        // a checkpoint every third step
      {"wait_at", ""},          // such as `forward 3`
      {"show", ""},             // instead: load the checkpoints of this folder on one rank
  };
};

/// Says where this rank is; where a test has asked for it, until that says go on.
void stop_at(const Settings& settings, const std::string& place) {
  if (settings.text("wait_at") != place) return;
  fmt::print("at {}\n", place);
  std::fflush(stdout);
  std::string line;
  std::getline(std::cin, line);
}

uint64_t hash_of(const torch::nn::Module& model) {
  uint64_t hash = 0;
  for (const auto& parameter : model.parameters()) {
    const auto local = fsdp::to_local(parameter).detach().contiguous();
    hash = mixed_hash(hash, stable_hash({static_cast<const char*>(local.const_data_ptr()), local.nbytes()}));
  }
  return hash;
}

void train(const Settings& settings) {
  const std::chrono::milliseconds timeout(settings.number("timeout_ms"));
  const auto world = fsdp::init_process_group({.backend = "gloo", .timeout = timeout});
  const auto mesh = fsdp::init_device_mesh(world, {world->size()}, {"shard"});
  torch::manual_seed(1);
  RankChain model(settings.number("width"));
  const fsdp::FullyShardOptions options{.mesh = mesh, .reshard_after_forward = settings.number("reshard") == 1};
  for (auto& layer : model->layers) fsdp::fully_shard(layer, options);
  const auto root = fsdp::fully_shard(model, options);
  fsdp::set_schedule_check(root, {.before_every_collective = settings.number("compare_every") == 1});
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-3));
  fsdp::CheckpointSaver saver({.world = world});
  torch::manual_seed(2 + world->rank());
  for (int step = 0; step < settings.number("steps"); ++step) {
    fmt::print("step {}\n", step);
    std::fflush(stdout);
    const bool disagrees = world->rank() == 1 && settings.number("disagree_at") >= 0 && step >= settings.number("disagree_at");
    stop_at(settings, fmt::format("forward {}", step));
    const auto loss = model->forward(torch::randn({4, settings.number("width")}), disagrees ? 1 : -1).square().sum();
    optimizer.zero_grad();
    stop_at(settings, fmt::format("backward {}", step));
    loss.backward();
    optimizer.step();
    if (!settings.text("save_into").empty() && step % 3 == 2) {
      stop_at(settings, fmt::format("save {}", step));
      saver.start_save(fmt::format("{}/step-{}", settings.text("save_into"), step), {model, optimizer});
    }
  }
  saver.wait();
  fmt::print("result {:x}\n", hash_of(*model));
}

/// The name of each checkpoint and a hash of its values. Throws where one is not whole.
void show(const Settings& settings) {
  for (const auto& entry : std::filesystem::directory_iterator(settings.text("show"))) {
    const auto name = entry.path().filename().string();
    if (name.starts_with(".")) continue;
    RankChain model(settings.number("width"));
    torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-3));
    fsdp::load_checkpoint(entry.path(), {model, optimizer});
    fmt::print("{} {:x}\n", name, hash_of(*model));
  }
}

}  // namespace

int run(int argc, char** argv) {
  return end_of_rank([&] {
    const Settings settings(argc, argv);
    if (settings.text("show").empty())
      train(settings);
    else
      show(settings);
  });
}

}  // namespace fsdp::test::network_faults
