#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace fsdp {

/// An open file or folder. Throws CheckpointError naming path, bytes and the system's reason. Threads may share it.
class File {
 public:
  /// The folder itself, for `open_in` and `sync`.
  static File folder(const std::string& path);
  /// A regular file in `folder`, by its plain name: no path, so that a name out of a checkpoint leads nowhere else.
  static File open_in(const File& folder, const std::string& name, bool follow_symlinks);
  /// A new file to write, which must not be there yet.
  static File create(const std::string& path);
  /// A file that is there, to write into.
  static File open_to_write(const std::string& path);

  File(File&& other) noexcept;
  File& operator=(File&&) = delete;
  ~File();

  const std::string& path() const { return path_; }
  int descriptor() const { return descriptor_; }
  int64_t bytes() const;
  /// Sets the length, with its place on the disk reserved where the file system can.
  void reserve(int64_t bytes) const;
  void read_at(int64_t offset, std::span<std::byte> into) const;
  void write_at(int64_t offset, std::span<const std::byte> from) const;
  /// Asks for what was written there to go to the disk, and returns at once.
  void start_sync(int64_t offset, int64_t bytes) const;
  /// Returns when all that was written is on the disk.
  void sync() const;

 private:
  File(int descriptor, std::string path) : descriptor_(descriptor), path_(std::move(path)) {}
  int descriptor_;
  std::string path_;
};

/// The whole of a file of at most `max_bytes`, which is there for files that are read into memory.
std::string read_text(const File& file, int64_t max_bytes);
/// Writes a new file and brings it to the disk.
void write_text(const std::string& path, const std::string& text);

}  // namespace fsdp
