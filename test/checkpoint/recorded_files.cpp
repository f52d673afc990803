#include "recorded_files.hpp"

#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <filesystem>
#include <map>
#include <mutex>
#include <set>

namespace fsdp::test {
namespace {

namespace fs = std::filesystem;
using Names = std::set<std::string>;

struct FileState {
  int64_t bytes = -1;
  int64_t written_ns = -1;
  bool operator==(const FileState&) const = default;
};

FileState state_of(const struct stat& status) {
  return {status.st_size, status.st_mtim.tv_sec * 1'000'000'000 + status.st_mtim.tv_nsec};
}

Names names_in(const fs::path& folder) {
  Names names;
  for (const auto& entry : fs::directory_iterator(folder)) names.insert(entry.path().filename());
  return names;
}

struct Record {
  std::mutex mutex;
  bool is_on = false;
  Exchanges exchanges = Exchanges::kAllowed;
  fs::path root;
  std::set<fs::path> old_folders;         // that were there at the beginning
  std::map<ino_t, FileState> synced;      // files, as they were then
  std::map<ino_t, Names> synced_entries;  // folders, what they had then
  std::vector<std::string> too_early, of_folders;

  /// Empty: outside of the root.
  std::string below_root(const fs::path& path) const {
    const auto relative = path.lexically_relative(root);
    return relative.empty() || *relative.begin() == ".." ? "" : relative.string();
  }

  static std::string without_tokens(const std::string& path) {
    const auto mark = path.find(".fsdp-");
    return mark == std::string::npos ? path : path.substr(0, path.find('-', mark + 6));
  }

  void written(int descriptor) {
    std::lock_guard lock(mutex);
    struct stat status {};
    if (is_on && ::fstat(descriptor, &status) == 0) synced.erase(status.st_ino);
  }

  /// What is on the disk is what was there before the call.
  void synced_now(int descriptor) {
    std::lock_guard lock(mutex);
    struct stat status {};
    if (!is_on || ::fstat(descriptor, &status) != 0) return;
    if (S_ISREG(status.st_mode)) synced[status.st_ino] = state_of(status);
    if (!S_ISDIR(status.st_mode)) return;
    const auto path = fs::read_symlink("/proc/self/fd/" + std::to_string(descriptor));
    synced_entries[status.st_ino] = names_in(path);
    if (const auto below = below_root(path); !below.empty()) of_folders.push_back("sync " + without_tokens(below));
  }

  void named(const fs::path& from, const fs::path& to) {
    std::lock_guard lock(mutex);
    const auto old_name = below_root(from), name = below_root(to);
    if (!is_on || name.empty()) return;
    of_folders.push_back("rename " + without_tokens(old_name) + " " + without_tokens(name));
    if (to.filename().string().front() == '.') return;
    check(from);
    check_above(to.parent_path());
  }

  void check(const fs::path& path) {
    struct stat status {};
    if (::lstat(path.c_str(), &status) != 0) return too_early.push_back(path.string() + ": not there");
    if (S_ISREG(status.st_mode)) {
      const auto found = synced.find(status.st_ino);
      if (found == synced.end() || found->second != state_of(status))
        too_early.push_back(without_tokens(below_root(path)));
    }
    if (!S_ISDIR(status.st_mode)) return;
    const auto found = synced_entries.find(status.st_ino);
    if (found == synced_entries.end() || found->second != names_in(path))
      too_early.push_back(without_tokens(below_root(path)));
    for (const auto& entry : fs::directory_iterator(path)) check(entry.path());
  }

  void check_above(fs::path folder) {
    for (; folder != root && !old_folders.contains(folder); folder = folder.parent_path()) {
      struct stat status {};
      ::stat(folder.parent_path().c_str(), &status);
      const auto found = synced_entries.find(status.st_ino);
      if (found == synced_entries.end() || !found->second.contains(folder.filename()))
        too_early.push_back(below_root(folder) + " in its parent");
    }
  }
};

Record& record() {
  static auto* one = new Record;
  return *one;
}

}  // namespace

RecordedFiles::RecordedFiles(const std::string& root, Exchanges exchanges) {
  auto& files = record();
  std::lock_guard lock(files.mutex);
  files.is_on = true;
  files.exchanges = exchanges;
  files.root = root;
  files.old_folders.clear();
  for (const auto& entry : fs::recursive_directory_iterator(root))
    if (entry.is_directory()) files.old_folders.insert(entry.path());
  files.synced.clear();
  files.synced_entries.clear();
  files.too_early.clear();
  files.of_folders.clear();
}

RecordedFiles::~RecordedFiles() {
  std::lock_guard lock(record().mutex);
  record().is_on = false;
}

std::vector<std::string> RecordedFiles::named_too_early() const {
  std::lock_guard lock(record().mutex);
  return record().too_early;
}

std::vector<std::string> RecordedFiles::of_folders() const {
  std::lock_guard lock(record().mutex);
  return record().of_folders;
}

}  // namespace fsdp::test

// In the place of the C library's, for this program and the libraries that it has loaded.
extern "C" {

ssize_t pwrite64(int descriptor, const void* bytes, size_t count, off64_t offset) {
  fsdp::test::record().written(descriptor);
  return ::syscall(SYS_pwrite64, descriptor, bytes, count, offset);
}

int fsync(int descriptor) {
  fsdp::test::record().synced_now(descriptor);
  return static_cast<int>(::syscall(SYS_fsync, descriptor));
}

int rename(const char* from, const char* to) noexcept {
  fsdp::test::record().named(from, to);
  return static_cast<int>(::syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0));
}

int renameat2(int from_folder, const char* from, int to_folder, const char* to, unsigned flags) noexcept {
  auto& files = fsdp::test::record();
  if (files.is_on && files.exchanges == fsdp::test::Exchanges::kRefused && (flags & RENAME_EXCHANGE) != 0) {
    errno = EINVAL;
    return -1;
  }
  files.named(from, to);
  return static_cast<int>(::syscall(SYS_renameat2, from_folder, from, to_folder, to, flags));
}
}
