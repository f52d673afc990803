#include "checkpoint/io/save_folder.hpp"

#include <fcntl.h>
#include <linux/fs.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <random>

#include "base/log.hpp"
#include "checkpoint/checkpoint_error.hpp"
#include "checkpoint/format/manifest.hpp"
#include "checkpoint/io/checkpoint_names.hpp"
#include "checkpoint/io/file.hpp"

namespace fsdp {

namespace {

namespace fs = std::filesystem;

constexpr auto kProbe = "fsdp_probe";
constexpr int64_t kMaxManifestBytes = int64_t{1} << 32;

/// Makes the folder, and those above it that are not there. Each is on the disk before what is put into it.
void make_folder(const fs::path& path) {
  std::error_code error;
  if (fs::is_directory(path, error)) return;
  make_folder(path.parent_path());
  fs::create_directory(path, error);
  require_checkpoint(!error, "{}: cannot be made: {}", path.string(), error.message());
  File::folder(path.parent_path()).sync();
}

/// Locks another folder than the one that is saved. What cannot be locked, such as another user's, is left alone: null then,
/// and where it is being written.
std::unique_ptr<SaveLock> try_lock(const std::string& parent, const std::string& name) {
  try {
    return SaveLock::take(parent, name);
  } catch (const CheckpointError& error) {
    log().warn("checkpoint: {} was not removed or changed, as it cannot be locked: {}", name, error.what());
    return nullptr;
  }
}

/// What `entry` in the folder `parent` has of the checkpoint `name`. By another name first, so that half of a checkpoint
/// is never taken for one; what stays of it, the next save finds.
void remove_checkpoint(const std::string& parent, const std::string& entry, const std::string& name,
                       const std::string& token, std::error_code& error) {
  const auto removed = parent + "/" + hidden_name(name, "removed-") + token;
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

SaveFolder::SaveFolder(const std::string& path)
    : path_(path),
      parent_(fs::path(path).parent_path()),
      name_(fs::path(path).filename()),
      token_(new_token()),
      folder_(saving_folder(path, token_)) {
  make_folder(parent_);
  lock_ = SaveLock::take(parent_, name_);
  require_checkpoint(lock_ != nullptr, "{}: another save to it is under way", path_);
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
    throw;
  }
}

SaveFolder::~SaveFolder() {
  std::error_code error;
  // After the exchange this is what was replaced.
  fs::remove_all(folder_, error);
  if (error) log().warn("checkpoint: {} cannot be removed: {}", folder_, error.message());
}

void SaveFolder::remove_leftovers() const {
  const auto series = series_name(name_);
  for (const auto& entry : names_in(parent_)) {
    const auto owner = left_by(entry);
    if (!owner) continue;
    const auto other = series_name(*owner);
    if (*owner != name_ && !(series && other && series->prefix == other->prefix)) continue;
    const auto lock = *owner == name_ ? nullptr : try_lock(parent_, *owner);
    if (*owner != name_ && !lock) continue;
    const auto left = parent_ + "/" + entry, whole = parent_ + "/" + *owner;
    std::error_code error;
    const bool was_checkpoint = entry.starts_with(hidden_name(*owner, "old-")) && is_checkpoint(left);
    if (!was_checkpoint)
      fs::remove_all(left, error);
    else if (fs::exists(whole, error))
      remove_checkpoint(parent_, entry, *owner, token_, error);
    else
      fs::rename(left, whole, error);
    if (error) log().warn("checkpoint: {}, which a killed save left, cannot be removed: {}", left, error.message());
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
    log().warn("checkpoint: the manifest of the checkpoint that is replaced is damaged, so all of its files are kept: {}",
               error.what());
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
  require_checkpoint(errno == EINVAL || errno == ENOSYS || errno == EOPNOTSUPP,
                     "{}: the finished checkpoint cannot be moved here: {}", path_, std::strerror(errno));
  const auto old_name = hidden_name(name_, "old-") + token_, old = parent_ + "/" + old_name;
  fs::rename(path_, old);
  std::error_code error, ignored;
  fs::rename(folder_, path_, error);
  if (error) fs::rename(old, path_, ignored);
  require_checkpoint(!error, "{}: the finished checkpoint cannot be moved here: {}", path_, error.message());
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
    log().warn("checkpoint: older checkpoints than {} were not removed: {}", path_, error.what());  // it is saved itself
  }
  std::erase(names, name_);
  // The one just saved counts, whatever its number.
  const size_t kept = static_cast<size_t>(keep_last) - 1;
  if (names.size() > kept) names.resize(names.size() - kept);
  else names.clear();
  for (const auto& name : names) {
    const auto lock = try_lock(parent_, name);
    if (!lock) continue;
    std::error_code error;
    remove_checkpoint(parent_, name, name, token_, error);
    if (error) log().warn("checkpoint: {}, an older one, cannot be removed: {}", name, error.message());
  }
}

void check_probe(const std::string& path, const std::string& token) {
  const auto folder = saving_folder(path, token);
  try {
    const auto text = read_text(File::open_in(File::folder(folder), kProbe, false), 1024);
    require_checkpoint(text == token, "{}: has the token '{}' of another save", folder, text);
  } catch (const CheckpointError& error) {
    throw CheckpointError(fmt::format(
        "{}: this rank does not see the folder that rank 0 made; a checkpoint needs one that all ranks share ({})", path,
        error.what()));
  }
}

}  // namespace fsdp
