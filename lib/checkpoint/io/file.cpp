#include "checkpoint/io/file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "checkpoint/checkpoint_error.hpp"

namespace fsdp {

namespace {

std::string reason() { return std::strerror(errno); }

int open_or_throw(int folder, const char* name, int flags, const std::string& path) {
  int descriptor;
  do descriptor = ::openat(folder, name, flags | O_CLOEXEC, 0666);
  while (descriptor < 0 && errno == EINTR);
  require_checkpoint(descriptor >= 0 || errno != ELOOP || (flags & O_NOFOLLOW) == 0,
                     "{}: is a symbolic link, which is not followed; set follow_symlinks if you trust it", path);
  require_checkpoint(descriptor >= 0, "{}: cannot be opened: {}", path, reason());
  return descriptor;
}

}  // namespace

File File::folder(const std::string& path) {
  return {open_or_throw(AT_FDCWD, path.c_str(), O_RDONLY | O_DIRECTORY, path), path};
}

File File::open_in(const File& folder, const std::string& name, bool follow_symlinks) {
  const auto path = folder.path() + "/" + name;
  require_checkpoint(!name.empty() && name != "." && name != ".." && name.find('/') == std::string::npos &&
                         name.find('\0') == std::string::npos,
                     "{}: '{}' is not the plain name of a file in the folder", folder.path(), name);
  // Not blocking: a FIFO would wait for its writer.
  const int flags = O_RDONLY | O_NONBLOCK | (follow_symlinks ? 0 : O_NOFOLLOW);
  File file(open_or_throw(folder.descriptor_, name.c_str(), flags, path), path);
  struct stat status {};
  require_checkpoint(::fstat(file.descriptor_, &status) == 0 && S_ISREG(status.st_mode), "{}: is not a regular file", path);
  return file;
}

File File::create(const std::string& path) {
  return {open_or_throw(AT_FDCWD, path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW, path), path};
}

File File::open_to_write(const std::string& path) {
  return {open_or_throw(AT_FDCWD, path.c_str(), O_WRONLY | O_NOFOLLOW, path), path};
}

File::File(File&& other) noexcept
    : descriptor_(std::exchange(other.descriptor_, -1)), path_(std::move(other.path_)) {}

File::~File() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

int64_t File::bytes() const {
  struct stat status {};
  require_checkpoint(::fstat(descriptor_, &status) == 0, "{}: its size cannot be read: {}", path_, reason());
  return status.st_size;
}

void File::reserve(int64_t bytes) const {
  if (bytes > 0) {
    int result;
    do result = ::fallocate(descriptor_, 0, 0, bytes);
    while (result != 0 && errno == EINTR);
    if (result == 0) return;
    // A full disk shows here, before anything is written.
    require_checkpoint(errno == EOPNOTSUPP || errno == ENOSYS || errno == EINVAL, "{}: {} bytes cannot be reserved: {}",
                       path_, bytes, reason());
  }
  require_checkpoint(::ftruncate(descriptor_, bytes) == 0, "{}: cannot be resized to {} bytes: {}", path_, bytes, reason());
}

void File::read_at(int64_t offset, std::span<std::byte> into) const {
  while (!into.empty()) {
    const auto count = ::pread(descriptor_, into.data(), std::min<size_t>(into.size(), 1U << 30), offset);
    if (count < 0 && errno == EINTR) continue;
    require_checkpoint(count >= 0, "{}: bytes {} to {} cannot be read: {}", path_, offset, offset + into.size(), reason());
    require_checkpoint(count > 0, "{}: ends at byte {}, {} bytes too early", path_, offset, into.size());
    into = into.subspan(count);
    offset += count;
  }
}

void File::write_at(int64_t offset, std::span<const std::byte> from) const {
  while (!from.empty()) {
    const auto count = ::pwrite(descriptor_, from.data(), std::min<size_t>(from.size(), 1U << 30), offset);
    if (count < 0 && errno == EINTR) continue;
    require_checkpoint(count > 0, "{}: bytes {} to {} cannot be written: {}", path_, offset, offset + from.size(),
                       reason());
    from = from.subspan(count);
    offset += count;
  }
}

void File::start_sync(int64_t offset, int64_t bytes) const {
  // Only a hint: what goes wrong here goes wrong in `sync` too, which says so.
  ::sync_file_range(descriptor_, offset, bytes, SYNC_FILE_RANGE_WRITE);
}

void File::sync() const {
  int result;
  do result = ::fsync(descriptor_);
  while (result != 0 && errno == EINTR);
  require_checkpoint(result == 0, "{}: cannot be flushed to the disk: {}", path_, reason());
}

std::string read_text(const File& file, int64_t max_bytes) {
  const int64_t bytes = file.bytes();
  require_checkpoint(bytes <= max_bytes, "{}: has {} bytes, expected {} at most", file.path(), bytes, max_bytes);
  std::string text(bytes, '\0');
  file.read_at(0, std::as_writable_bytes(std::span(text)));
  return text;
}

void write_text(const std::string& path, const std::string& text) {
  const auto file = File::create(path);
  file.write_at(0, std::as_bytes(std::span(text)));
  file.sync();
}

}  // namespace fsdp
