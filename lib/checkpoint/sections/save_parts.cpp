#include <ATen/ATen.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>

#include "base/require.hpp"
#include "checkpoint/format/block_sums.hpp"
#include "checkpoint/format/manifest.hpp"
#include "checkpoint/format/strict_json.hpp"
#include "checkpoint/io/checkpoint_names.hpp"
#include "checkpoint/io/file.hpp"
#include "checkpoint/io/piece_writer.hpp"
#include "checkpoint/io/save_folder.hpp"
#include "checkpoint/plan/save_plan.hpp"
#include "checkpoint/sections/optimizer_section.hpp"
#include "fsdp/checkpoint_parts.hpp"

namespace fsdp {

namespace {

// Of sums that the ranks exchange at once, all ranks' together, which bounds the memory.
constexpr size_t kSumsAtOnce = size_t{1} << 20, kLeastSumsAtOnce = 1024;

void require_options(const std::string& path, const SaveCheckpointOptions& options) {
  require(options.keep_last >= 0, "save_checkpoint: keep_last is {}, expected 0 or more", options.keep_last);
  require(options.keep_last == 0 || series_name(path.substr(path.rfind('/') + 1)).has_value(),
          "save_checkpoint: keep_last needs a path that ends in a number, such as step-100, found '{}'", path);
  require(!options.dtype || at::isFloatingType(*options.dtype), "save_checkpoint: dtype is {}, expected a floating-point one",
          options.dtype ? c10::toString(*options.dtype) : "");
}

using Documents = std::map<std::string, std::string>;

/// The first rank's; of optimizers, whose parameters may differ, all ranks'. A collective call.
Documents joined_documents(const RankGroup& ranks, Documents documents) {
  const auto own = documents.find(kOptimizerFile);
  const auto texts = ranks.all_gather_different(own == documents.end() ? "" : own->second);
  if (texts.empty()) return documents;
  ranks.together([&] { documents[kOptimizerFile] = merge_optimizer_documents(texts); });
  return documents;
}

void require_documents(const Documents& documents, const FilePlan& plan) {
  for (const auto& [name, text] : documents) {
    require(name.ends_with(".json") && name.find('/') == std::string::npos && name.front() != '.' &&
                name != kManifestFile && !plan.indexes.contains(name),
            "save_checkpoint: a document cannot be named '{}'; expected a name of its own that ends in .json", name);
    require(nlohmann::json::accept(text), "save_checkpoint: the document '{}' is not JSON", name);
  }
}

void lay_headers(const FilePlan& plan, const std::string& folder, std::vector<BlockSums>& sums) {
  for (size_t i = 0; i < plan.files.size(); ++i) {
    const auto& planned = plan.files[i];
    const auto file = File::create(folder + "/" + planned.name);
    file.reserve(planned.bytes);
    auto header = planned.header;
    header.resize(planned.header_bytes, ' ');
    const auto bytes = std::as_bytes(std::span(header));
    file.write_at(0, bytes);
    sums[i].add(0, bytes);
  }
}

std::vector<std::vector<uint32_t>> exchange_sums(const RankGroup& ranks, const std::vector<BlockSums>& sums) {
  std::vector<int64_t> own, all;
  for (const auto& file : sums) own.insert(own.end(), file.parts().begin(), file.parts().end());
  const size_t at_once = std::max<size_t>(kLeastSumsAtOnce, kSumsAtOnce / ranks.size());
  for (size_t begin = 0; begin < own.size(); begin += at_once) {
    const size_t end = std::min(own.size(), begin + at_once);
    std::vector<int64_t> together(end - begin, 0);
    for (const auto& numbers : ranks.all_gather(std::vector<int64_t>(own.begin() + begin, own.begin() + end)))
      for (size_t i = 0; i < numbers.size(); ++i) together[i] ^= numbers[i];
    all.insert(all.end(), together.begin(), together.end());
  }
  std::vector<std::vector<uint32_t>> by_file;
  size_t next = 0;
  for (const auto& file : sums) {
    by_file.emplace_back(all.begin() + next, all.begin() + next + file.parts().size());
    next += file.parts().size();
  }
  return by_file;
}

void write_listed(Manifest& manifest, const std::string& folder, const std::string& name, const std::string& text) {
  write_text(folder + "/" + name, text);
  BlockSums sums(static_cast<int64_t>(text.size()));
  sums.add(0, std::as_bytes(std::span(text)));
  manifest.files[name] = {static_cast<int64_t>(text.size()),
                          finished_sums(sums.parts(), static_cast<int64_t>(text.size()))};
}

/// Documents, indexes and last the manifest, which makes the folder a checkpoint.
std::set<std::string> write_rest(const RankGroup& ranks, const Documents& documents, const SavePlan& plan,
                                 const std::string& folder, std::vector<std::vector<uint32_t>> sums) {
  Manifest manifest{.world_size = ranks.size()};
  for (size_t i = 0; i < plan.files.files.size(); ++i) {
    const auto& file = plan.files.files[i];
    // Who wrote pieces has brought these to the disk; the header may be of a rank that wrote none.
    File::open_to_write(folder + "/" + file.name).sync();
    manifest.files[file.name] = {file.bytes, finished_sums(std::move(sums[i]), file.bytes)};
  }
  for (const auto& [name, text] : documents) {
    write_listed(manifest, folder, name, text);
    manifest.documents.push_back(name);
  }
  for (const auto& [name, text] : plan.files.indexes) write_listed(manifest, folder, name, text);
  manifest.sections = plan.files.sections;
  write_text(folder + "/" + kManifestFile, make_manifest(manifest));
  std::set<std::string> names{kManifestFile};
  for (const auto& [name, entry] : manifest.files) names.insert(name);
  return names;
}

}  // namespace

void save_checkpoint_parts(const std::string& given_path, const CheckpointParts& parts, const SaveCheckpointOptions& options) {
  const RankGroup ranks(options.world, "save_checkpoint");
  std::string path;
  ranks.together([&] {
    path = checkpoint_path(given_path);
    require_options(path, options);
  });
  const auto plan = plan_save(ranks, parts, options.max_file_bytes);
  const auto documents = joined_documents(ranks, parts.documents);
  ranks.on_first([&] { require_documents(documents, plan.files); });

  std::optional<SaveFolder> folder;
  ranks.on_first([&] { folder.emplace(path); });
  const auto token = ranks.broadcast(folder ? folder->token() : "");
  ranks.together([&] { check_probe(path, token); });
  std::vector<BlockSums> sums;
  for (const auto& file : plan.files.files) sums.emplace_back(file.bytes);
  ranks.on_first([&] {
    folder->remove_probe();
    lay_headers(plan.files, folder->folder(), sums);
  });
  ranks.together([&] { write_pieces(plan, saving_folder(path, token), sums); });
  auto all_sums = exchange_sums(ranks, sums);
  ranks.on_first([&] {
    folder->commit(write_rest(ranks, documents, plan, folder->folder(), std::move(all_sums)));
    folder->retain(options.keep_last);
  });
}

}  // namespace fsdp
