#include "checkpoint/io/checkpoint_names.hpp"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <set>

#include "base/require.hpp"
#include "checkpoint/checkpoint_error.hpp"
#include "checkpoint/format/manifest.hpp"

namespace fsdp {

namespace {

namespace fs = std::filesystem;

}  // namespace

std::string hidden_name(const std::string& name, const std::string& kind) { return "." + name + ".fsdp-" + kind; }

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

std::string checkpoint_path(const std::string& path) {
  auto normal = fs::absolute(path).lexically_normal();
  if (!normal.has_filename()) normal = normal.parent_path();
  require(!path.empty() && normal.has_filename(), "checkpoint: '{}' is not the path of a folder", path);
  return normal;
}

std::string saving_folder(const std::string& path, const std::string& token) {
  const fs::path whole(path);
  return whole.parent_path().string() + "/" + hidden_name(whole.filename(), "saving-") + token;
}

bool is_checkpoint(const std::string& path) {
  std::error_code error;
  return fs::is_regular_file(fs::path(path) / kManifestFile, error);
}

std::string readable_checkpoint(const std::string& path) {
  const fs::path whole(path);
  std::error_code error;
  if (fs::exists(whole, error) || !fs::is_directory(whole.parent_path(), error)) return path;
  const auto beginning = hidden_name(whole.filename(), "old-");
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
    const auto name = owner && entry.starts_with(hidden_name(*owner, "old-")) ? *owner : entry;
    if (const auto series = series_name(name); series && name.front() != '.' && (!prefix || series->prefix == *prefix) &&
                                               is_checkpoint(readable_checkpoint(parent + "/" + name)))
      found.emplace(series->number, name);
  }
  std::vector<std::string> names;
  for (const auto& item : found) names.push_back(item.second);
  return names;
}

std::optional<std::string> latest_checkpoint(const std::string& parent) {
  std::error_code error;
  if (!fs::is_directory(parent, error)) return std::nullopt;
  const auto names = series_in(parent, std::nullopt);
  if (names.empty()) return std::nullopt;
  return (fs::path(parent) / names.back()).string();
}

}  // namespace fsdp
