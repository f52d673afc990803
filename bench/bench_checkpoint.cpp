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
// As the library reads and writes (lib/checkpoint/io): in blocks, and after so many bytes the disk is asked to begin.
constexpr int64_t kBlockBytes = int64_t{1} << 20;
constexpr int64_t kReadBytes = 4 * kBlockBytes;
constexpr int64_t kSyncBytes = 16 * kBlockBytes;

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
        {"raw_read_cold", &CheckpointBench::raw_read_cold},
        {"load", &CheckpointBench::load},
        {"load_cold", &CheckpointBench::load_cold},
        {"load_unverified", &CheckpointBench::load_unverified},
        {"start_save", &CheckpointBench::start_save}};
    return (this->*kMeasurements.at(what))();
  }

 private:
  /// An open file that is closed at the end.
  struct RawFile {
    RawFile(const std::string& path, int flags) : path(path), descriptor(::open(path.c_str(), flags | O_CLOEXEC, 0644)) {
      check(descriptor);
    }
    ~RawFile() { ::close(descriptor); }
    RawFile(const RawFile&) = delete;
    RawFile& operator=(const RawFile&) = delete;
    int64_t check(int64_t result) const {
      if (result < 0) throw std::system_error(errno, std::generic_category(), path);
      return result;
    }
    std::string path;
    int descriptor;
  };

  /// Every rank its part of one file, whose place is reserved, and which is on the disk when all are done.
  Measured raw_write() {
    remove("raw");
    return measure_together(*world_, [&] {
      if (world_->rank() == 0) {
        const RawFile file(path("raw"), O_WRONLY | O_CREAT);
        if (::fallocate(file.descriptor, 0, 0, world_->size() * raw_.numel()) != 0)  // where the file system can
          file.check(::ftruncate(file.descriptor, world_->size() * raw_.numel()));
      }
      barrier(*world_);
      const RawFile file(path("raw"), O_WRONLY);
      int64_t unsynced = 0;
      for_raw(kBlockBytes, [&](char* bytes, int64_t count, int64_t offset) {
        const int64_t moved = file.check(::pwrite(file.descriptor, bytes, count, offset));
        if ((unsynced += moved) >= kSyncBytes) {
          ::sync_file_range(file.descriptor, offset + moved - unsynced, unsynced, SYNC_FILE_RANGE_WRITE);
          unsynced = 0;
        }
        return moved;
      });
      file.check(::fsync(file.descriptor));
      barrier(*world_);
    });
  }

  /// Of what was written just before, so from the page cache.
  Measured raw_read() {
    return measure_together(*world_, [&] {
      const RawFile file(path("raw"), O_RDONLY);
      for_raw(kReadBytes, [&](char* bytes, int64_t count, int64_t offset) {
        return file.check(::pread(file.descriptor, bytes, count, offset));
      });
    });
  }

  Measured raw_read_cold() {
    drop_from_page_cache("raw");
    return raw_read();
  }

  /// move: (bytes, count, offset in the file) -> bytes that were moved.
  template <class Move>
  void for_raw(int64_t most, const Move& move) {
    auto* const bytes = static_cast<char*>(raw_.mutable_data_ptr());
    for (int64_t done = 0; done < raw_.numel();) {
      const int64_t moved = move(bytes + done, std::min(most, raw_.numel() - done), world_->rank() * raw_.numel() + done);
      if (moved == 0) throw StateError("bench: the raw file is too short");
      done += moved;
    }
  }

  /// A file, or the files of a folder, which are on the disk.
  void drop_from_page_cache(const std::string& name) {
    if (world_->rank() == 0) {
      const auto drop = [](const fs::path& path) {
        const RawFile file(path.string(), O_RDONLY);
        ::posix_fadvise(file.descriptor, 0, 0, POSIX_FADV_DONTNEED);
      };
      if (fs::is_regular_file(folder_ / name)) drop(folder_ / name);
      else
        for (const auto& entry : fs::recursive_directory_iterator(folder_ / name))
          if (entry.is_regular_file()) drop(entry.path());
    }
    barrier(*world_);
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
  Measured load_cold() {
    drop_from_page_cache("ours");
    return load();
  }
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
