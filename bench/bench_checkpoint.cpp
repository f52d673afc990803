#include <fcntl.h>
#include <malloc.h>
#include <torch/torch.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <system_error>

#include "bench_models.hpp"
#include "bench_worker.hpp"
#include "fsdp/fsdp.hpp"

namespace fsdp::bench {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kDim = 1024;
constexpr int64_t kRawPieceBytes = int64_t{8} << 20;

/// `matrices` modules with a parameter of [1024, 1024] each. The twin of Matrices in
/// bench/pytorch/checkpoint.py.
struct MatricesImpl : torch::nn::Module {
  explicit MatricesImpl(int64_t matrices) {
    for (int64_t i = 0; i < matrices; ++i)
      layers->push_back(torch::nn::Linear(torch::nn::LinearOptions(kDim, kDim).bias(false)));
    register_module("layers", layers);
  }

  torch::nn::ModuleList layers;
};
TORCH_MODULE(Matrices);

/// A line of /proc/self/status that is in kB, in bytes.
int64_t memory(const std::string& name) {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;)
    if (int64_t value = 0; word == name + ":" && status >> value) return value * 1024;
  return 0;
}

struct Measured {
  double seconds = 0;
  int64_t extra_bytes = 0;  ///< the most that this process held meanwhile, over what it held before
};

Measured measure_together(Communicator& world, const std::function<void()>& function) {
  ::malloc_trim(0);                             // what was freed before does not count as held
  std::ofstream("/proc/self/clear_refs") << 5;  // the peak starts from here
  const int64_t before = memory("VmHWM");
  barrier(world);
  const double taken = seconds(function);
  return {taken, memory("VmHWM") - before};
}

[[noreturn]] void fail_io(const std::string& path) {
  throw std::system_error(errno, std::generic_category(), path);
}

class CheckpointBench {
 public:
  CheckpointBench(const std::shared_ptr<Communicator>& world, const nlohmann::json& request)
      : world_(world),
        folder_(request.at("folder").get<std::string>()),
        model_(request.at("matrices").get<int64_t>()) {
    bytes_ = parameter_bytes(*model_);
    const auto mesh = init_device_mesh(world, {world->size()}, {"shard"});
    for (const auto& layer : *model_->layers) fully_shard(*layer, {.mesh = mesh});
    fully_shard(model_, {.mesh = mesh});
    raw_ = torch::ones({bytes_ / world->size()}, torch::kByte);
    fill(1);
    saver_.emplace(CheckpointSaverOptions{.world = world});
  }

  int64_t bytes() const { return bytes_; }

  /// One measurement, by its name in the request.
  Measured measure(const std::string& what) {
    static const std::map<std::string, Measured (CheckpointBench::*)()> kMeasurements = {
        {"raw_write", &CheckpointBench::raw_write},
        {"save", &CheckpointBench::save},
        {"raw_read", &CheckpointBench::raw_read},
        {"load", &CheckpointBench::load},
        {"load_unverified", &CheckpointBench::load_unverified},
        {"start_save", &CheckpointBench::start_save}};
    return (this->*kMeasurements.at(what))();
  }

 private:
  /// Every rank its part of one file, which is on the disk when all are done.
  Measured raw_write() {
    remove("raw");
    return measure_together(*world_, [&] {
      move_raw(O_WRONLY | O_CREAT, [](auto... arguments) { return ::pwrite(arguments...); });
      barrier(*world_);
    });
  }

  /// Of what was written just before, so from the page cache.
  Measured raw_read() {
    return measure_together(*world_, [&] {
      move_raw(O_RDONLY, [](auto... arguments) { return ::pread(arguments...); });
    });
  }

  template <class Move>
  void move_raw(int flags, const Move& move) {
    const auto path = (folder_ / "raw").string();
    const int file = ::open(path.c_str(), flags | O_CLOEXEC, 0644);
    if (file < 0) fail_io(path);
    auto* const bytes = static_cast<char*>(raw_.mutable_data_ptr());
    const int64_t begin = world_->rank() * raw_.numel();
    for (int64_t done = 0; done < raw_.numel();) {
      const auto moved =
          move(file, bytes + done, std::min(kRawPieceBytes, raw_.numel() - done), begin + done);
      if (moved <= 0) fail_io(path);
      done += moved;
    }
    if (flags != O_RDONLY && ::fsync(file) != 0) fail_io(path);
    ::close(file);
  }

  Measured save() {
    remove("ours");
    return measure_together(*world_,
                            [&] { save_checkpoint(path("ours"), contents(), {.world = world_}); });
  }

  /// How long a training step is held up; the writing itself is waited for afterwards.
  Measured start_save() {
    remove("aside");
    const auto measured =
        measure_together(*world_, [&] { saver_->start_save(path("aside"), contents()); });
    saver_->wait();
    return measured;
  }

  Measured load() { return load_with(VerifyChecksums::kWhileLoading); }
  Measured load_unverified() { return load_with(VerifyChecksums::kNever); }

  Measured load_with(VerifyChecksums verify) {
    fill(0);
    const auto measured = measure_together(*world_, [&] {
      load_checkpoint(path("ours"), contents(), {.world = world_, .verify = verify});
    });
    for (const auto& parameter : model_->parameters())
      if (to_local(parameter).flatten()[-1].item<float>() != 1)
        throw StateError("bench: a parameter was not loaded");
    return measured;
  }

  Checkpoint contents() { return {.model = model_, .rng_state = false}; }
  std::string path(const std::string& name) const { return (folder_ / name).string(); }

  void fill(float value) {
    torch::NoGradGuard no_grad;
    for (auto& parameter : model_->parameters()) parameter.fill_(value);
  }

  /// Before the clock starts: a save into a new folder replaces nothing.
  void remove(const std::string& name) {
    if (world_->rank() == 0) fs::remove_all(folder_ / name);
    barrier(*world_);
  }

  std::shared_ptr<Communicator> world_;
  fs::path folder_;
  Matrices model_;
  int64_t bytes_ = 0;
  at::Tensor raw_;
  std::optional<CheckpointSaver> saver_;
};

}  // namespace

void serve_checkpoint() {
  at::set_num_threads(1);
  const auto world = join_world();
  std::optional<CheckpointBench> bench;
  serve([&](const nlohmann::json& request) -> nlohmann::json {
    if (request.at("do") == "setup") {
      bench.emplace(world, request);
      return {{"bytes", bench->bytes()}};
    }
    const auto measured = bench->measure(request.at("do"));
    return {{"seconds", measured.seconds}, {"extra_bytes", measured.extra_bytes}};
  });
}

}  // namespace fsdp::bench
