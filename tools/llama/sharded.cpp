#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fmt/format.h>
#include <fsdp/fsdp.hpp>
#include <optional>

#include "execution.hpp"

namespace llama {
namespace {

// The first two steps learn the order of use and follow it for the first time.
constexpr int64_t kFirstRecorded = 2, kRecorded = 3;

fsdp::ReshardAfterForward reshard_mode(const std::string& mode) {
  if (mode == "auto") return {};
  if (mode == "true" || mode == "false") return mode == "true";
  return std::stoi(mode);
}

fsdp::ProcessGroupOptions world_options(const RankOptions& options) {
  const auto backend = options.device == "cpu" ? "gloo" : options.device == "cuda" ? "nccl" : "";
  const std::chrono::duration<double> timeout(options.timeout_s);
  return {.backend = fsdp::launch_environment().world_size == 1 ? "" : backend,
          .timeout = std::chrono::duration_cast<std::chrono::milliseconds>(timeout)};
}

class Sharded : public Execution {
 public:
  Sharded(LanguageModel model, const Options& options)
      : model_(std::move(model)),
        world_(fsdp::init_process_group(world_options(options.ranks))),
        root_(shard(model_, fsdp::init_device_mesh(world_, {world_->size()}, {"shard"}),
                    reshard_mode(options.ranks.reshard_after_forward))),
        timeline_path_(options.output.timeline) {}

  int rank() const override { return world_->rank(); }
  int ranks() const override { return world_->size(); }
  torch::Device device() const override { return root_.mesh().device(); }

  double mean_over_ranks(double value, const std::string& subject) override {
    const auto sum = torch::full({1}, value, torch::dtype(torch::kDouble).device(device()));
    world_->start_all_reduce(sum, fsdp::ReduceOp::kSum, subject)->wait();
    return sum.item<double>() / ranks();
  }

  int64_t from_rank0(int64_t value) override {
    const auto shared = torch::full({1}, value, torch::dtype(torch::kLong).device(device()));
    world_->start_broadcast(shared, /*root=*/0, "a sampled byte")->wait();
    return shared.item<int64_t>();
  }

  void clip_gradients(double max_norm) override {
    fsdp::clip_grad_norm_(model_->parameters(), max_norm);
  }

  torch::Tensor predict(const torch::Tensor& tokens) override {
    torch::NoGradGuard no_grad;
    const auto scope = fsdp::forward_scope(root_);
    return model_->forward(tokens);
  }

  HeldBytes held_bytes() const override {
    const auto bytes = fsdp::parameter_bytes(root_);
    // One rank holds everything all the time and never gathers.
    return {bytes.sharded, std::max(bytes.sharded, bytes.peak_unsharded)};
  }

  void begin_step(int64_t step) override {
    if (timeline_path_.empty()) return;
    if (step == kFirstRecorded) fsdp::start_timeline(root_);
    if (step == kFirstRecorded + kRecorded) recorded_ = fsdp::stop_timeline(root_);
  }

  void write_timeline() override {
    if (timeline_path_.empty()) return;
    if (!recorded_) recorded_ = fsdp::stop_timeline(root_);  // the run ended before
    const auto part = [&](int rank) { return fmt::format("{}.rank{}", timeline_path_, rank); };
    recorded_->write(part(rank()));
    mean_over_ranks(0, "timelines are written");
    if (rank() != 0) return;
    std::vector<std::string> parts;
    for (int rank = 0; rank < ranks(); ++rank) parts.push_back(part(rank));
    fsdp::merge_timelines(parts, timeline_path_);
    for (const auto& path : parts) std::filesystem::remove(path);
  }

  std::string report() const override { return root_.report().to_string(); }

 private:
  // All that it takes to shard the model.
  static fsdp::FSDPModule shard(LanguageModel& model, const fsdp::DeviceMesh& mesh,
                                fsdp::ReshardAfterForward blocks) {
    for (auto& block : *model->blocks)
      fsdp::fully_shard(*block, {.mesh = mesh, .reshard_after_forward = blocks});
    return fsdp::fully_shard(*model, {.mesh = mesh, .reshard_after_forward = false});
  }

  LanguageModel model_;
  std::shared_ptr<fsdp::Communicator> world_;
  fsdp::FSDPModule root_;
  std::string timeline_path_;
  std::optional<fsdp::Timeline> recorded_;
};

}  // namespace

std::unique_ptr<Execution> run_sharded(LanguageModel model, const Options& options) {
  return std::make_unique<Sharded>(std::move(model), options);
}

}  // namespace llama
