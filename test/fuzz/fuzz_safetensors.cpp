#include <sys/mman.h>
#include <unistd.h>

#include "check.hpp"
#include "checkpoint/checkpoint_error.hpp"
#include "checkpoint/format/safetensors.hpp"

// A whole .safetensors file: whatever it has, its reader returns tensors that fill it, or throws CheckpointError.
namespace {

/// The bytes as a file.
class MemoryFile {
 public:
  MemoryFile(const uint8_t* bytes, size_t count) : descriptor_(memfd_create("fuzz.safetensors", 0)) {
    check(write(descriptor_, bytes, count) == static_cast<ssize_t>(count), "the fuzzer's own file is written");
  }
  ~MemoryFile() { close(descriptor_); }
  fsdp::File open() const {
    return fsdp::File::open_in(fsdp::File::folder("/proc/self/fd"), std::to_string(descriptor_), true);
  }

 private:
  int descriptor_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t count) {
  const MemoryFile file(bytes, count);
  try {
    const auto header = fsdp::read_safetensors(file.open());
    int64_t end = header.data_begin;
    for (const auto& tensor : header.tensors) {
      check(tensor.offset == end, "tensors lie one after another");
      check(tensor.bytes == fsdp::checked_bytes(tensor.sizes, tensor.dtype, "t"), "a tensor has its sizes' bytes");
      end += tensor.bytes;
    }
    check(end == static_cast<int64_t>(count), "tensors fill the file");
  } catch (const fsdp::CheckpointError&) {
  }
  return 0;
}
