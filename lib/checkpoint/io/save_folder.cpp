#include "checkpoint/io/save_folder.hpp"

#include <fcntl.h>
#include <linux/fs.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <random>

#include "base/log.hpp"
#include "base/require.hpp"
#include "checkpoint/checkpoint_error.hpp"
#include "checkpoint/format/manifest.hpp"

namespace fsdp {

namespace {

namespace fs = std::filesystem;

constexpr auto kProbe = "fsdp_probe";
constexpr int64_t kMaxManifestBytes = int64_t{1} << 32;

std::string hidden(const std::string& name, const char* kind) { return "." + name + ".fsdp-" + kind; }

/// The folder whose save left `entry` behind; nullopt: nothing of ours.
std::optional<std::string> left_by(const std::string& entry) {
  if (entry.empty() || entry.front() != '.') return std::nullopt;
  for (const auto* kind : {"saving", "old", "removed"}) {
    const auto mark = std::string(".fsdp-") + kind + "-";
    if (const auto at = entry.rfind(mark); at != std::string::npos && at > 1) return entry.substr(1, at - 1);
  }
  return std::nullopt;
}

std::vector<std::string> names_in(const std::string& folder) {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error))
    names.push_back(entry->path().filename());
  require_checkpoint(!error, "{}: cannot be listed: {}", folder, error.message());
  std::sort(names.begin(), names.end());
  return names;
}

/// With those above it that are not there. Each is on the disk before what is put into it.
void make_folder(const fs::path& path) {
  std::error_code error;
  if (fs::is_directory(path, error)) return;
  make_folder(path.parent_path());
  fs::create_directory(path, error);
  require_checkpoint(!error, "{}: cannot be made: {}", path.string(), error.message());
  File::folder(path.parent_path()).sync();
}

/// The lock of a save to `name`; -1: somebody else has it.
int take_lock(const std::string& parent, const std::string& name) {
  const auto path = parent + "/" + hidden(name, "lock");
  for (;;) {
    const int lock = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666);
    require_checkpoint(lock >= 0, "{}: cannot be made: {}", path, std::strerror(errno));
    if (::flock(lock, LOCK_EX | LOCK_NB) != 0) {
      const int reason = errno;
      ::close(lock);
      require_checkpoint(reason == EWOULDBLOCK || reason == EINTR, "{}: cannot be locked: {}", path, std::strerror(reason));
      return -1;
    }
    // Whoever had it before may have removed the file since it was opened here.
    struct stat held {}, named {};
    if (::fstat(lock, &held) == 0 && ::stat(path.c_str(), &named) == 0 && held.st_ino == named.st_ino) return lock;
    ::close(lock);
  }
}

/// For another folder than the one that is saved: what cannot be locked, such as another user's, is left alone.
int try_lock(const std::string& parent, const std::string& name) {
  try {
    return take_lock(parent, name);
  } catch (const CheckpointError& error) {
    log().warn("checkpoint: {} is left as it is: {}", name, error.what());
    return -1;
  }
}

void drop_lock(int lock, const std::string& parent, const std::string& name) {
  ::unlink((parent + "/" + hidden(name, "lock")).c_str());
  ::close(lock);
}

/// What `entry` in the folder `parent` has of the checkpoint `name`. By another name first, so that half of a checkpoint
/// is never taken for one; what stays of it, the next save finds.
void remove_checkpoint(const std::string& parent, const std::string& entry, const std::string& name,
                       const std::string& token, std::error_code& error) {
  const auto removed = parent + "/" + hidden(name, "removed-") + token;
  fs::rename(parent + "/" + entry, removed, error);
  if (!error) fs::remove_all(removed, error);
}

std::string new_token() {
  std::random_device device;
  return fmt::format("{:08x}{:08x}", device(), device());
}

void sync_tree(const fs::path& path) {
  if (fs::is_symlink(path)) return;
  if (fs::is_directory(path)) {
    for (const auto& entry : fs::directory_iterator(path)) sync_tree(entry.path());
    File::folder(path).sync();
  } else if (fs::is_regular_file(path)) {
    File::open_in(File::folder(path.parent_path()), path.filename(), false).sync();  // it may be read-only
  }
}

}  // namespace

std::string checkpoint_path(const std::string& path) {
  auto normal = fs::absolute(path).lexically_normal();
  if (!normal.has_filename()) normal = normal.parent_path();
  require(!path.empty() && normal.has_filename(), "checkpoint: '{}' is not the path of a folder", path);
  return normal;
}

std::string saving_folder(const std::string& path, const std::string& token) {
  const fs::path whole(path);
  return whole.parent_path().string() + "/" + hidden(whole.filename(), "saving-") + token;
}

bool is_checkpoint(const std::string& path) {
  std::error_code error;
  return fs::is_regular_file(fs::path(path) / kManifestFile, error);
}

std::string readable_checkpoint(const std::string& path) {
  const fs::path whole(path);
  std::error_code error;
  if (fs::exists(whole, error) || !fs::is_directory(whole.parent_path(), error)) return path;
  const auto beginning = hidden(whole.filename(), "old-");
  for (const auto& name : names_in(whole.parent_path()))
    if (const auto old = (whole.parent_path() / name).string(); name.starts_with(beginning) && is_checkpoint(old)) return old;
  return path;
}

std::optional<SeriesName> series_name(const std::string& name) {
  size_t begin = name.size();
  while (begin > 0 && std::isdigit(static_cast<unsigned char>(name[begin - 1])) != 0) --begin;
  SeriesName series{name.substr(0, begin)};
  const auto [end, error] = std::from_chars(name.data() + begin, name.data() + name.size(), series.number);
  if (error != std::errc()) return std::nullopt;
  return series;
}

std::vector<std::string> series_in(const std::string& parent, const std::optional<std::string>& prefix) {
  std::set<std::pair<int64_t, std::string>> found;
  for (const auto& entry : names_in(parent)) {
    const auto owner = left_by(entry);
    // A save that was killed between two renames has left the checkpoint under a hidden name.
    const auto name = owner && entry.starts_with(hidden(*owner, "old-")) ? *owner : entry;
    if (const auto series = series_name(name); series && name.front() != '.' && (!prefix || series->prefix == *prefix) &&
                                               is_checkpoint(readable_checkpoint(parent + "/" + name)))
      found.emplace(series->number, name);
  }
  std::vector<std::string> names;
  for (const auto& item : found) names.push_back(item.second);
  return names;
}

SaveFolder::SaveFolder(const std::string& path)
    : path_(path),
      parent_(fs::path(path).parent_path()),
      name_(fs::path(path).filename()),
      token_(new_token()),
      folder_(saving_folder(path, token_)) {
  make_folder(parent_);
  lock_ = take_lock(parent_, name_);
  require_checkpoint(lock_ >= 0, "{}: another save to it is under way", path_);
  std::error_code error;
  try {
    remove_leftovers();
    const bool is_there = fs::exists(fs::symlink_status(path_));
    require_checkpoint(!is_there || (!fs::is_symlink(path_) && fs::is_directory(path_)),
                       "{}: is there already, and is no folder", path_);
    require_checkpoint(!is_there || is_checkpoint(path_) || fs::is_empty(path_),
                       "{}: is there already, and is no checkpoint (it has no {}); choose another path", path_, kManifestFile);
    fs::create_directory(folder_, error);
    require_checkpoint(!error, "{}: cannot be made: {}", folder_, error.message());
    write_text(folder_ + "/" + kProbe, token_);
  } catch (...) {
    fs::remove_all(folder_, error);
    drop_lock(lock_, parent_, name_);
    throw;
  }
}

SaveFolder::~SaveFolder() {
  std::error_code error;
  // After the exchange this is what was replaced.
  fs::remove_all(folder_, error);
  if (error) log().warn("checkpoint: {} cannot be removed: {}", folder_, error.message());
  drop_lock(lock_, parent_, name_);
}

void SaveFolder::remove_leftovers() const {
  const auto series = series_name(name_);
  for (const auto& entry : names_in(parent_)) {
    const auto owner = left_by(entry);
    if (!owner) continue;
    const auto other = series_name(*owner);
    if (*owner != name_ && !(series && other && series->prefix == other->prefix)) continue;
    const int lock = *owner == name_ ? lock_ : try_lock(parent_, *owner);
    if (lock < 0) continue;  // it is being written
    const auto left = parent_ + "/" + entry, whole = parent_ + "/" + *owner;
    std::error_code error;
    const bool was_checkpoint = entry.starts_with(hidden(*owner, "old-")) && is_checkpoint(left);
    if (!was_checkpoint)
      fs::remove_all(left, error);
    else if (fs::exists(whole, error))
      remove_checkpoint(parent_, entry, *owner, token_, error);
    else
      fs::rename(left, whole, error);
    if (error) log().warn("checkpoint: {}, which a killed save left, cannot be removed: {}", left, error.message());
    if (lock != lock_) drop_lock(lock, parent_, *owner);
  }
}

void SaveFolder::remove_probe() const { ::unlink((folder_ + "/" + kProbe).c_str()); }

void SaveFolder::carry_over(const std::set<std::string>& own_files) const {
  if (!is_checkpoint(path_)) return;
  std::set<std::string> old_files{kManifestFile};
  try {
    const auto text = read_text(File::open_in(File::folder(path_), kManifestFile, false), kMaxManifestBytes);
    for (const auto& [name, entry] : parse_manifest(text, path_ + "/" + kManifestFile).files) old_files.insert(name);
  } catch (const CheckpointError& error) {
    log().warn("checkpoint: the one that is replaced is damaged, so all of its files are kept: {}", error.what());
  }
  for (const auto& name : names_in(path_)) {
    if (old_files.contains(name) || own_files.contains(name)) continue;
    fs::copy(path_ + "/" + name, folder_ + "/" + name, fs::copy_options::recursive | fs::copy_options::copy_symlinks);
    sync_tree(folder_ + "/" + name);
  }
}

void SaveFolder::exchange() const {
  if (!fs::exists(path_)) return fs::rename(folder_, path_);
  if (::renameat2(AT_FDCWD, folder_.c_str(), AT_FDCWD, path_.c_str(), RENAME_EXCHANGE) == 0) return;
  require_checkpoint(errno == EINVAL || errno == ENOSYS || errno == EOPNOTSUPP, "{}: cannot take its place: {}", path_,
                     std::strerror(errno));
  const auto old_name = hidden(name_, "old-") + token_, old = parent_ + "/" + old_name;
  fs::rename(path_, old);
  std::error_code error, ignored;
  fs::rename(folder_, path_, error);
  if (error) fs::rename(old, path_, ignored);
  require_checkpoint(!error, "{}: cannot take its place: {}", path_, error.message());
  File::folder(parent_).sync();
  remove_checkpoint(parent_, old_name, name_, token_, ignored);
}

void SaveFolder::commit(const std::set<std::string>& own_files) {
  carry_over(own_files);
  File::folder(folder_).sync();
  exchange();
  File::folder(parent_).sync();
}

void SaveFolder::retain(int keep_last) const {
  if (keep_last == 0) return;
  std::vector<std::string> names;
  try {
    names = series_in(parent_, series_name(name_)->prefix);
  } catch (const CheckpointError& error) {
    log().warn("checkpoint: older ones than {} stay: {}", path_, error.what());  // it is saved itself
  }
  std::erase(names, name_);
  // The one just saved counts, whatever its number.
  const size_t kept = static_cast<size_t>(keep_last) - 1;
  if (names.size() > kept) names.resize(names.size() - kept);
  else names.clear();
  for (const auto& name : names) {
    const int lock = try_lock(parent_, name);
    if (lock < 0) continue;
    std::error_code error;
    remove_checkpoint(parent_, name, name, token_, error);
    if (error) log().warn("checkpoint: {}, an older one, cannot be removed: {}", name, error.message());
    drop_lock(lock, parent_, name);
  }
}

void check_probe(const std::string& path, const std::string& token) {
  const auto folder = saving_folder(path, token);
  try {
    const auto text = read_text(File::open_in(File::folder(folder), kProbe, false), 1024);
    require_checkpoint(text == token, "{}: holds '{}'", folder, text);
  } catch (const CheckpointError& error) {
    throw CheckpointError(fmt::format(
        "{}: this rank does not see the folder that rank 0 made; a checkpoint needs one that all ranks share ({})", path,
        error.what()));
  }
}

std::optional<std::string> latest_checkpoint(const std::string& parent) {
  std::error_code error;
  if (!fs::is_directory(parent, error)) return std::nullopt;
  const auto names = series_in(parent, std::nullopt);
  if (names.empty()) return std::nullopt;
  return (fs::path(parent) / names.back()).string();
}

}  // namespace fsdp
