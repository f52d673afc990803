#include "checkpoint/format/catalogue.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <set>

#include "checkpoint/checkpoint_error.hpp"
#include "checkpoint/format/dtype_names.hpp"
#include "checkpoint/format/manifest.hpp"
#include "checkpoint/format/strict_json.hpp"
#include "checkpoint/format/weight_index.hpp"
#include "checkpoint/io/checked_file.hpp"
#include "checkpoint/io/checkpoint_names.hpp"

namespace fsdp {

namespace {

namespace fs = std::filesystem;

constexpr auto kModel = "model";

class Reading {
 public:
  Reading(const std::string& folder, bool verifies, bool follow_symlinks)
      : folder_(File::folder(folder)), verifies_(verifies), follow_symlinks_(follow_symlinks) {
    catalogue_.folder = folder;
  }

  Catalogue checkpoint() {
    const auto manifest = parse_manifest(text_of(kManifestFile), folder_.path() + "/" + kManifestFile);
    catalogue_.world_size = manifest.world_size;
    for (const auto& [section, files] : manifest.sections) {
      catalogue_.sections[section];
      for (const auto& name : files) add_file(section, name, &manifest.files.at(name));
    }
    for (const auto& name : manifest.documents) {
      auto file = open(name, manifest.files.at(name));
      auto& text = catalogue_.documents[name];
      text.resize(std::min(file.entry().bytes, kMaxTextBytes));
      file.read(0, std::as_writable_bytes(std::span(text)));
    }
    return std::move(catalogue_);
  }

  Catalogue indexed(const std::string& index_name) {
    const auto subject = folder_.path() + "/" + index_name;
    const auto index = parse_weight_index(text_of(index_name), subject);
    std::set<std::string> files;
    for (const auto& [tensor, name] : index.files) files.insert(name);
    for (const auto& name : files) add_file(kModel, name, nullptr);
    auto& tensors = catalogue_.sections[kModel].tensors;
    std::set<std::string> found;
    for (const auto& tensor : tensors) found.insert(tensor.name);
    for (const auto& [tensor, name] : index.files)
      require_checkpoint(found.contains(tensor), "{}: tensor '{}' is said to be in '{}', which does not have it", subject,
                         tensor, name);
    return std::move(catalogue_);
  }

  Catalogue single(const std::string& name) {
    add_file(kModel, name, nullptr);
    return std::move(catalogue_);
  }

 private:
  std::string text_of(const std::string& name) const {
    return read_text(File::open_in(folder_, name, follow_symlinks_), kMaxTextBytes);
  }

  CheckedFile open(const std::string& name, const Manifest::FileEntry& entry) const {
    return {File::open_in(folder_, name, follow_symlinks_), {name, entry.bytes, entry.sums}, verifies_};
  }

  /// Checked as it is read: a damaged header is told as such, not as one that makes no sense.
  SafetensorsHeader checked_header(const std::string& name, const Manifest::FileEntry& entry) const {
    auto file = open(name, entry);
    return read_safetensors(folder_.path() + "/" + name, entry.bytes,
                            [&](int64_t offset, std::span<std::byte> into) { file.read(offset, into); });
  }

  void add_file(const std::string& section_name, const std::string& name, const Manifest::FileEntry* listed) {
    auto file = File::open_in(folder_, name, follow_symlinks_);
    const int64_t bytes = file.bytes();
    require_checkpoint(listed == nullptr || listed->bytes == bytes, "{}: has {} bytes, the manifest says {}", file.path(),
                       bytes, listed == nullptr ? 0 : listed->bytes);
    const auto header = listed == nullptr ? read_safetensors(file) : checked_header(name, *listed);
    auto& section = catalogue_.sections[section_name];
    for (const auto& tensor : header.tensors) {
      require_checkpoint(known_.insert({section_name, tensor.name}).second, "{}: tensor '{}' is in another file too",
                         file.path(), tensor.name);
      section.tensors.push_back({tensor.name, tensor.dtype, tensor.sizes,
                                 {catalogue_.files.size(), tensor.offset, tensor.bytes}});
    }
    if (const auto names = header.metadata.find(kOtherNames); names != header.metadata.end()) {
      const auto subject = file.path() + ": " + kOtherNames;
      const auto others = parse_strict(names->second, 1, subject);
      require_checkpoint(others.is_object(), "{}: is not an object", subject);
      for (const auto& other : others.items())
        section.other_names[other.key()] = string_at(others, other.key().c_str(), subject);
    }
    catalogue_.files.push_back({name, bytes, listed == nullptr ? std::nullopt : std::optional(listed->sums)});
  }

  File folder_;
  bool verifies_, follow_symlinks_;
  Catalogue catalogue_;
  std::set<std::pair<std::string, std::string>> known_;
};

}  // namespace

Catalogue read_catalogue(const std::string& given_path, bool verifies, bool follow_symlinks) {
  const auto path = readable_checkpoint(checkpoint_path(given_path));
  std::error_code error;
  require_checkpoint(fs::exists(path, error), "{}: there is no such file or folder", path);
  if (!fs::is_directory(path, error)) {
    const fs::path file(path);
    return Reading(file.parent_path(), verifies, follow_symlinks).single(file.filename());
  }
  Reading reading(path, verifies, follow_symlinks);
  if (is_checkpoint(path)) return reading.checkpoint();
  const auto index = index_file_of(kModel), whole = fmt::format("{}.safetensors", kModel);
  if (fs::exists(fs::symlink_status(fs::path(path) / index, error))) return reading.indexed(index);
  require_checkpoint(fs::exists(fs::symlink_status(fs::path(path) / whole, error)),
                     "{}: is no checkpoint: it has neither {} nor {} nor {}", path, kManifestFile, index, whole);
  return reading.single(whole);
}

std::string to_text(const Catalogue& catalogue) {
  nlohmann::json value;
  value["folder"] = catalogue.folder;
  value["world_size"] = catalogue.world_size;
  value["documents"] = catalogue.documents;
  value["files"] = nlohmann::json::array();
  for (const auto& file : catalogue.files)
    value["files"].push_back({file.name, file.bytes, file.sums ? nlohmann::json(*file.sums) : nlohmann::json()});
  value["sections"] = nlohmann::json::object();
  for (const auto& [name, section] : catalogue.sections) {
    auto tensors = nlohmann::json::array();
    for (const auto& tensor : section.tensors)
      tensors.push_back({tensor.name, safetensors_dtype(tensor.dtype), tensor.sizes, tensor.place.file, tensor.place.offset,
                         tensor.place.bytes});
    value["sections"][name] = {{"tensors", tensors}, {"other_names", section.other_names}};
  }
  return dump(value, catalogue.folder);
}

Catalogue catalogue_from(const std::string& text) {
  const auto value = nlohmann::json::parse(text);
  Catalogue catalogue{.folder = value["folder"], .world_size = value["world_size"]};
  catalogue.documents = value["documents"].get<std::map<std::string, std::string>>();
  for (const auto& file : value["files"]) {
    Catalogue::DataFile entry{file[0], file[1]};
    if (!file[2].is_null()) entry.sums = file[2].get<std::vector<uint32_t>>();
    catalogue.files.push_back(std::move(entry));
  }
  for (const auto& item : value["sections"].items()) {
    auto& section = catalogue.sections[item.key()];
    section.other_names = item.value()["other_names"].get<std::map<std::string, std::string>>();
    for (const auto& tensor : item.value()["tensors"])
      section.tensors.push_back({tensor[0], *dtype_of_safetensors(tensor[1].get<std::string>()), tensor[2],
                                 {tensor[3], tensor[4], tensor[5]}});
  }
  return catalogue;
}

}  // namespace fsdp
