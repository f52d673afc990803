#include "data.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>

namespace llama {
namespace {

namespace fs = std::filesystem;

/// SplitMix64's output function: every bit of the result depends on every bit of `x`.
uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

std::string read_file(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::string bytes{std::istreambuf_iterator<char>(file), {}};
  if (!file.is_open() || file.bad()) throw DataError(fmt::format("cannot read {}", path.string()));
  return bytes;
}

bool is_text(const std::string& bytes) {
  return bytes.find('\0') >= std::min<size_t>(bytes.size(), 4096);
}

bool is_left_out(const std::string& name) {
  return name.starts_with('.') || name == "__pycache__" || name == "site-packages" ||
         name == "dist-packages";
}

bool has_suffix(const std::string& name, const std::vector<std::string>& suffixes) {
  return suffixes.empty() || std::ranges::any_of(suffixes, [&](const std::string& suffix) {
           return name.ends_with(suffix);
         });
}

/// Relative paths of the files below `folder`, in the same order everywhere.
std::vector<std::string> list_files(const fs::path& folder,
                                    const std::vector<std::string>& suffixes) {
  std::vector<std::string> files;
  try {
    for (auto entry = fs::recursive_directory_iterator(folder); entry != fs::end(entry); ++entry) {
      const auto name = entry->path().filename().string();
      if (is_left_out(name)) {
        entry.disable_recursion_pending();
      } else if (entry->is_regular_file() && has_suffix(name, suffixes)) {
        files.push_back(entry->path().lexically_relative(folder).generic_string());
      }
    }
  } catch (const fs::filesystem_error& error) {
    throw DataError(
        fmt::format("cannot read {}: {}", error.path1().string(), error.code().message()));
  }
  std::ranges::sort(files);
  return files;
}

Corpus split_file(const fs::path& path) {
  const auto text = read_file(path);
  const auto cut = text.size() - text.size() / 10;
  return {text.substr(0, cut), text.substr(cut), 1, 1};
}

Corpus split_folder(const fs::path& folder, const std::vector<std::string>& suffixes) {
  struct File {
    std::string text;
    bool held_out = false;
    uint64_t hash = 0;
  };
  std::vector<File> files;
  for (const auto& name : list_files(folder, suffixes)) {
    auto text = read_file(folder / name);
    if (!is_text(text)) continue;
    files.push_back({std::move(text), text_hash(name) % 20 == 0, text_hash(name)});
  }
  // Of a handful of files none may have been picked; then the one with the lowest hash is.
  if (files.size() > 1 && std::ranges::none_of(files, &File::held_out))
    std::ranges::min_element(files, {}, &File::hash)->held_out = true;

  Corpus corpus;
  for (const auto& file : files) {
    (file.held_out ? corpus.held_out : corpus.training) += file.text;
    ++(file.held_out ? corpus.held_out_files : corpus.training_files);
  }
  return corpus;
}

void check_size(const std::string& path, const char* side, size_t bytes, int64_t least_bytes) {
  if (static_cast<int64_t>(bytes) >= least_bytes) return;
  throw DataError(
      fmt::format("{} has {} bytes of {} text, fewer than the {} of one row; give more "
                  "text or a smaller --context",
                  path, bytes, side, least_bytes));
}

}  // namespace

Corpus read_corpus(const std::string& path, const std::vector<std::string>& suffixes,
                   int64_t least_bytes) {
  std::error_code error;
  const auto status = fs::status(path, error);
  if (!fs::exists(status))
    throw DataError(fmt::format("cannot read {}: {}", path,
                                error ? error.message() : "No such file or directory"));
  auto corpus = fs::is_directory(status) ? split_folder(path, suffixes) : split_file(path);
  check_size(path, "training", corpus.training.size(), least_bytes);
  check_size(path, "held-out", corpus.held_out.size(), least_bytes);
  return corpus;
}

uint64_t text_hash(const std::string& text) {
  // std::hash may differ between machines.
  uint64_t value = 0xcbf29ce484222325u;
  for (const char c : text) value = (value ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return mix(value);
}

int64_t RowSampler::start(int64_t step, int64_t row, int64_t text_bytes) const {
  const auto counter = static_cast<uint64_t>(step * rows_per_batch + row);
  return static_cast<int64_t>(mix(mix(seed) ^ counter) %
                              static_cast<uint64_t>(text_bytes - row_bytes + 1));
}

double uniform(uint64_t seed, uint64_t counter) {
  return static_cast<double>(mix(mix(seed) ^ counter) >> 11) * 0x1.0p-53;
}

}  // namespace llama
