#include "fsdp/checkpoint_saver.hpp"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <atomic>
#include <numeric>
#include <optional>
#include <thread>

#include "base/log.hpp"
#include "checkpoint/io/checkpoint_names.hpp"
#include "checkpoint/sections/training_parts.hpp"
#include "collectives/buffer.hpp"
#include "fsdp/process_group.hpp"

namespace fsdp {

namespace {

constexpr auto kStartSave = "CheckpointSaver::start_save";

std::shared_ptr<Communicator> own_group(Communicator& world) {
  if (world.size() == 1) return single_rank();
  std::vector<int> ranks(world.size());
  std::iota(ranks.begin(), ranks.end(), 0);
  return world.split(ranks, "checkpoint saver");
}

int64_t held_bytes(const CheckpointParts& parts) {
  int64_t bytes = 0;
  for (const auto& section : parts.sections)
    for (const auto& tensor : section.tensors) bytes += static_cast<int64_t>(tensor.local.nbytes());
  return bytes;
}

/// Copies the tensors into one buffer, which is kept for the next time: fresh memory costs most of the time that a step is held
/// up.
void copy_aside(CheckpointParts& parts, at::Tensor& buffer) {
  const c10::InferenceMode no_inference(false);  // whose tensors could be written in that mode alone
  at::NoGradGuard no_grad;
  constexpr int64_t kAlignment = 64;
  std::vector<CheckpointTensor*> tensors;
  int64_t bytes = 0;
  for (auto& section : parts.sections)
    for (auto& tensor : section.tensors) {
      tensors.push_back(&tensor);
      bytes += (static_cast<int64_t>(tensor.local.nbytes()) + kAlignment - 1) / kAlignment * kAlignment;
    }
  if (!buffer.defined() || buffer.numel() < bytes) {
    buffer.reset();  // before there is another
    buffer = make_buffer(bytes, at::device(at::kCPU).dtype(at::kByte));
  }
  int64_t begin = 0;
  for (auto* tensor : tensors) {
    const auto& local = tensor->local;
    const auto size = static_cast<int64_t>(local.nbytes());
    const auto copy = buffer.narrow(0, begin, size).view(local.scalar_type()).view(local.sizes());
    tensor->local = copy.copy_(local);
    begin += (size + kAlignment - 1) / kAlignment * kAlignment;
  }
}

}  // namespace

struct CheckpointSaver::State {
  std::shared_ptr<Communicator> world, group;
  CheckpointSaverOptions options;
  std::thread writer;
  std::atomic<bool> is_writing = false;
  std::exception_ptr error;  // of the writer; read once it has been joined
  at::Tensor aside;          // memory of the copies

  void write(const std::string& path, const CheckpointParts& parts, const SaveCheckpointOptions& save) {
    try {
      save_checkpoint_parts(path, parts, save);
    } catch (...) {
      error = std::current_exception();
    }
    is_writing = false;
  }

  void join() {
    if (writer.joinable()) writer.join();
  }

  /// True on every rank if any rank is writing, whichever is done first.
  bool is_writing_anywhere() const {
    const auto flags = RankGroup(world, kStartSave).all_gather(std::vector<int64_t>{is_writing ? 1 : 0});
    return std::any_of(flags.begin(), flags.end(), [](const auto& flag) { return flag.front() != 0; });
  }
};

CheckpointSaver::CheckpointSaver(const CheckpointSaverOptions& options) : state_(new State) {
  state_->options = options;
  state_->world = RankGroup(options.world, kStartSave).world();
  state_->group = own_group(*state_->world);
}

CheckpointSaver::~CheckpointSaver() {
  state_->join();
  try {
    if (state_->error) std::rethrow_exception(state_->error);
  } catch (const std::exception& error) {
    log().error("checkpoint: the last save failed: {}", error.what());
  }
}

bool CheckpointSaver::is_saving() const { return state_->is_writing; }

void CheckpointSaver::wait() {
  state_->join();
  if (const auto error = std::exchange(state_->error, nullptr)) std::rethrow_exception(error);
}

bool CheckpointSaver::start_save(const std::string& path, const Checkpoint& checkpoint, SaveCheckpointOptions options) {
  const RankGroup ranks(state_->world, kStartSave);
  return start_save_parts(path, [&] { return training_parts(checkpoint, ranks, options); }, options);
}

bool CheckpointSaver::start_save_parts(const std::string& given_path, const std::function<CheckpointParts()>& collect,
                                       SaveCheckpointOptions options) {
  if (state_->options.when_saving == WhenSaving::kRefuse && state_->is_writing_anywhere()) return false;
  const RankGroup ranks(state_->world, kStartSave);
  // Together: only some ranks may have waited for the last save themselves, and have its error behind them.
  ranks.together([&] { wait(); });
  auto parts = std::make_shared<CheckpointParts>();
  bool is_copied = false;
  std::string path;
  ranks.together([&] {
    path = checkpoint_path(given_path);  // now: the program may go to another folder meanwhile
    *parts = collect();
    is_copied = held_bytes(*parts) <= state_->options.max_copy_bytes;
    if (is_copied) copy_aside(*parts, state_->aside);
  });
  options.world = state_->group;
  state_->is_writing = true;
  const auto device_type = state_->group->device_type();
  std::optional<c10::Device> device;
  if (device_type != at::kCPU) device = c10::impl::VirtualGuardImpl(device_type).getDevice();
  state_->writer = std::thread([state = state_.get(), path, parts, options, device] {
    if (device) c10::impl::VirtualGuardImpl(device->type()).setDevice(*device);
    state->write(path, *parts, options);
  });
  if (!is_copied) wait();
  return true;
}

}  // namespace fsdp
