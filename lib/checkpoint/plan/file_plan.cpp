#include "checkpoint/plan/file_plan.hpp"

#include <algorithm>
#include <set>

#include "base/require.hpp"
#include "checkpoint/format/strict_json.hpp"
#include "checkpoint/format/weight_index.hpp"

namespace fsdp {

namespace {

std::string describe(const SectionDescription& section, const std::string& name) {
  return fmt::format("checkpoint section '{}': tensor '{}'", section.name, name);
}

void require_names(const SectionDescription& section) {
  const bool is_plain = !section.name.empty() && std::all_of(section.name.begin(), section.name.end(), [](unsigned char c) {
    return std::isalnum(c) != 0 || c == '_' || c == '-';
  });
  require(is_plain, "checkpoint section '{}': expected a name of letters, digits, '_' and '-', which begins file names",
          section.name);
  std::set<std::string> known;
  for (const auto& tensor : section.tensors) {
    require(tensor.name != "__metadata__", "{}: the format keeps this name for itself", describe(section, tensor.name));
    require(known.insert(tensor.name).second, "{}: there are two of this name", describe(section, tensor.name));
  }
  for (const auto& tensor : section.tensors)
    for (const auto& name : tensor.other_names)
      require(known.insert(name).second, "{}: its other name '{}' is another tensor's", describe(section, tensor.name), name);
}

/// Returns, for each file, the tensors that share it.
std::vector<std::vector<size_t>> split(const SectionDescription& section, int64_t max_file_bytes) {
  std::vector<std::vector<size_t>> files;
  int64_t filled = 0;
  for (size_t i = 0; i < section.tensors.size(); ++i) {
    const auto& tensor = section.tensors[i];
    const int64_t bytes = checked_bytes(tensor.sizes, tensor.dtype, describe(section, tensor.name));
    if (files.empty() || bytes > max_file_bytes - filled) {
      files.emplace_back();
      filled = 0;
    }
    files.back().push_back(i);
    filled += bytes;
  }
  for (auto& file : files)
    std::stable_sort(file.begin(), file.end(), [&](size_t a, size_t b) {
      return c10::elementSize(section.tensors[a].dtype) > c10::elementSize(section.tensors[b].dtype);
    });
  return files;
}

std::map<std::string, std::string> metadata_of(const SectionDescription& section, const std::vector<size_t>& tensors) {
  std::map<std::string, std::string> metadata{{"format", "pt"}};  // transformers asks for it
  auto others = nlohmann::json::object();
  for (const size_t i : tensors)
    for (const auto& name : section.tensors[i].other_names) others[name] = section.tensors[i].name;
  if (!others.empty()) metadata[kOtherNames] = dump(others, "checkpoint section '" + section.name + "'");
  return metadata;
}

void plan_section(const SectionDescription& section, int64_t max_file_bytes, FilePlan& plan) {
  require_names(section);
  auto& places = plan.places.emplace_back(section.tensors.size());
  auto& names = plan.sections[section.name];
  WeightIndex index;
  const auto files = split(section, max_file_bytes);
  for (size_t number = 0; number < files.size(); ++number) {
    PlannedFile file{.name = files.size() == 1
                                 ? section.name + ".safetensors"
                                 : fmt::format("{}-{:05}-of-{:05}.safetensors", section.name, number + 1, files.size()),
                     .header = {}};
    std::vector<SafetensorsEntry> entries;
    for (const size_t i : files[number])
      entries.push_back({section.tensors[i].name, section.tensors[i].dtype, section.tensors[i].sizes});
    file.header = make_safetensors(entries, metadata_of(section, files[number]), file.name);
    file.bytes = file.header_bytes = static_cast<int64_t>(file.header.size());
    file.header.resize(file.header.find_last_not_of(' ') + 1);
    file.header.shrink_to_fit();
    for (size_t k = 0; k < entries.size(); ++k) {
      places[files[number][k]] = {plan.files.size(), entries[k].offset, entries[k].bytes};
      file.bytes += entries[k].bytes;
      index.total_bytes += entries[k].bytes;
      index.files[entries[k].name] = file.name;
    }
    names.push_back(file.name);
    plan.files.push_back(std::move(file));
  }
  const auto index_name = index_file_of(section.name);
  plan.indexes[index_name] = make_weight_index(index, index_name);
}

}  // namespace

std::string index_file_of(const std::string& section) { return section + ".safetensors.index.json"; }

FilePlan plan_files(const std::vector<SectionDescription>& sections, int64_t max_file_bytes) {
  require(max_file_bytes > 0, "save_checkpoint: max_file_bytes is {}, expected a positive number", max_file_bytes);
  FilePlan plan;
  std::set<std::string> names;
  for (const auto& section : sections) {
    require(names.insert(section.name).second, "checkpoint section '{}': there are two of this name", section.name);
    plan_section(section, max_file_bytes, plan);
  }
  std::set<std::string> files;
  for (const auto& file : plan.files)
    require(files.insert(file.name).second, "checkpoint: two sections would both write '{}'; name them otherwise", file.name);
  return plan;
}

}  // namespace fsdp
