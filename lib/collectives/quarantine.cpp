#include "collectives/quarantine.hpp"

#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <map>

#include "base/log.hpp"
#include "comm/debug/poison.hpp"

namespace fsdp {

namespace {

/// Behind the storage of a guarded buffer.
struct Guarded {
  at::Tensor memory;
  BufferOrigin origin;
  std::shared_ptr<Quarantine> quarantine;
};

void release_guarded(void* context) {
  const std::unique_ptr<Guarded> guarded(static_cast<Guarded*>(context));
  try {
    guarded->quarantine->add(std::move(guarded->memory), std::move(guarded->origin));
  } catch (const std::exception& error) {
    log().error("sanitizer: a released buffer cannot be watched for later writes: {}", error.what());
  }
}

thread_local const GuardedBuffers* innermost = nullptr;

}  // namespace

std::shared_ptr<Quarantine> Quarantine::shared(int64_t bytes, c10::Device device) {
  static auto* const mutex = new std::mutex;
  static auto* const all = new std::map<std::pair<c10::DeviceType, c10::DeviceIndex>, std::weak_ptr<Quarantine>>;
  const std::lock_guard lock(*mutex);
  auto& known = (*all)[{device.type(), device.index()}];
  auto quarantine = known.lock();
  if (!quarantine) known = quarantine = std::make_shared<Quarantine>();
  const std::lock_guard inner(quarantine->mutex_);
  quarantine->limit_bytes_ = std::max(quarantine->limit_bytes_, bytes);
  return quarantine;
}

Quarantine::~Quarantine() {
  for (const auto& entry : entries_) examine(entry);
}

void Quarantine::add(at::Tensor memory, BufferOrigin origin) {
  poison(memory);
  std::vector<Held> leaving;  // examined and freed without the lock
  {
    const std::lock_guard lock(mutex_);
    held_bytes_ += static_cast<int64_t>(memory.nbytes());
    entries_.push_back({std::move(memory), std::move(origin)});
    while (held_bytes_ > limit_bytes_ && entries_.size() > 1) {
      leaving.push_back(std::move(entries_.front()));
      entries_.pop_front();
      held_bytes_ -= static_cast<int64_t>(leaving.back().memory.nbytes());
    }
  }
  for (const auto& entry : leaving) examine(entry);
}

void Quarantine::check(const FaultLog* faults) {
  const std::lock_guard lock(mutex_);
  for (const auto& entry : entries_)
    if (entry.origin.faults.get() == faults) examine(entry);
}

void Quarantine::examine(const Held& entry) {
  const auto byte = first_written_byte(entry.memory);
  if (!byte) return;
  const auto& parts = entry.origin.parts;
  const auto part = std::find_if(parts.begin(), parts.end(), [&](const NamedBytes& known) {
    return known.begin <= *byte && *byte < known.begin + known.bytes;
  });
  if (part != parts.end())
    entry.origin.faults->add(
        fmt::format("parameter '{}': its unsharded memory was written, at byte {} of {}, after it had been "
                    "released; a pointer to it is good only until its module is resharded",
                    part->name, *byte - part->begin, part->bytes));
  else
    entry.origin.faults->add(fmt::format("{}: the memory was written, at byte {} of {}, after it had been released",
                                         entry.origin.name, *byte, entry.memory.nbytes()));
  poison(entry.memory);  // told once
}

GuardedBuffers::GuardedBuffers(const BufferGuard& guard, std::string name)
    : guard_(guard), name_(std::move(name)), outer_(innermost) {
  innermost = this;
}

GuardedBuffers::~GuardedBuffers() { innermost = outer_; }

const GuardedBuffers* GuardedBuffers::current() { return innermost; }

at::Tensor GuardedBuffers::protect(at::Tensor memory) const {
  if (memory.nbytes() == 0) return memory;
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  poison(memory);
  const auto numel = memory.numel();
  auto* const data = memory.mutable_data_ptr();
  const size_t bytes = memory.nbytes();
  const auto device = memory.device();
  auto buffer = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(memory.storage()), memory.key_set(), memory.dtype());
  auto guarded = std::make_unique<Guarded>(
      Guarded{std::move(memory), {.faults = guard_.faults, .name = name_}, guard_.quarantine});
  c10::DataPtr pointer(data, guarded.release(), &release_guarded, device);
  buffer.unsafeGetTensorImpl()->set_storage_keep_dtype(
      c10::Storage(c10::Storage::use_byte_size_t(), static_cast<int64_t>(bytes), std::move(pointer),
                   /*allocator=*/nullptr, /*resizable=*/false));
  buffer.unsafeGetTensorImpl()->set_sizes_contiguous({numel});
  return buffer;
}

void name_parts(const at::Tensor& buffer, std::vector<NamedBytes> parts) {
  auto* const guarded = buffer.storage().data_ptr().cast_context<Guarded>(&release_guarded);
  if (guarded != nullptr) guarded->origin.parts = std::move(parts);
}

}  // namespace fsdp
