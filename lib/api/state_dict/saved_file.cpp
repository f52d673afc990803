#include "fsdp/saved_file.hpp"

#include <fmt/format.h>

#include <cerrno>
#include <filesystem>
#include <random>
#include <system_error>

#include "base/require.hpp"

namespace fsdp {

namespace {

namespace fs = std::filesystem;

std::string reason_of_system() { return std::generic_category().message(errno); }

/// Of no other rank, on whatever host.
std::string name_beside(const std::string& path) {
  std::random_device random;
  return fmt::format("{}.{:08x}{:08x}.saving", path, random(), random());
}

/// A link stays, and what it leads to is replaced.
std::string behind_links(std::string path) {
  std::error_code error;
  const auto real = fs::canonical(path, error);
  return error || !fs::is_symlink(path) ? path : real.string();
}

bool takes_a_place(const std::string& path) {
  std::error_code ignored;
  const auto status = fs::symlink_status(path, ignored);
  return !fs::exists(status) || fs::is_regular_file(status);
}

}  // namespace

SavedFile::SavedFile(std::string path)
    : path_(behind_links(std::move(path))), written_(takes_a_place(path_) ? name_beside(path_) : path_) {
  constexpr auto kNew = std::ios::out | std::ios::binary | std::ios::trunc;
  errno = 0;
  stream_.open(written_, kNew);
  // A folder that takes no new files may still have one that can be written.
  if (!stream_.is_open() && written_ != path_) stream_.open(written_ = path_, kNew);
  require_state(stream_.is_open(), "torch::save: cannot open '{}': {}", path_, reason_of_system());
}

SavedFile::~SavedFile() {
  if (is_committed_ || written_ == path_) return;
  stream_.close();
  std::error_code ignored;
  fs::remove(written_, ignored);
}

void SavedFile::commit() {
  errno = 0;
  stream_.close();
  require_state(!stream_.fail(), "torch::save: writing '{}' failed: {}", path_, reason_of_system());
  if (written_ != path_) {
    std::error_code error;
    if (const auto before = fs::status(path_, error); !error && fs::exists(before))
      fs::permissions(written_, before.permissions(), error);
    fs::rename(written_, path_, error);
    require_state(!error, "torch::save: '{}' cannot be put at '{}': {}", written_, path_, error.message());
  }
  is_committed_ = true;
}

}  // namespace fsdp
