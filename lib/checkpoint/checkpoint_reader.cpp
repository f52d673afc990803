#include <fmt/ranges.h>

#include <algorithm>
#include <set>
#include <tuple>

#include "api/state_dict/require_fits.hpp"
#include "base/require.hpp"
#include "base/stable_hash.hpp"
#include "checkpoint/io/find_damage.hpp"
#include "checkpoint/io/load_values.hpp"
#include "checkpoint/plan/rank_group.hpp"
#include "fsdp/checkpoint_parts.hpp"

namespace fsdp {

namespace {

constexpr int64_t kLeastExtraBytes = int64_t{4} << 20;

void describe(std::string& text, const std::string& section, const IncompatibleKeys& misfits) {
  if (misfits.empty()) return;
  if (section != "model") text += " In '" + section + "':";
  append_list(text, "Missing", misfits.missing);
  append_list(text, "Unexpected", misfits.unexpected);
  append_list(text, "Wrong", misfits.wrong);
}

void leave_out(const CatalogueEntries& asked, const Catalogue::Section& section, IncompatibleKeys& misfits) {
  std::set<std::string> names;
  for (const auto& entry : section.tensors)
    if (asked.contains(&entry)) names.insert("'" + entry.name + "'");
  std::erase_if(misfits.unexpected, [&](const auto& name) { return names.contains(name); });
}

void append(std::vector<std::string>& all, const std::vector<std::string>& some) {
  all.insert(all.end(), some.begin(), some.end());
}

template <class Value>
std::vector<std::string> keys_of(const std::map<std::string, Value>& values) {
  std::vector<std::string> keys;
  for (const auto& [key, value] : values) keys.push_back(key);
  return keys;
}

}  // namespace

struct CheckpointReader::State {
  RankGroup ranks;
  LoadCheckpointOptions options;
  Catalogue catalogue;

  bool verifies() const { return options.verify != VerifyChecksums::kNever; }

  SectionMatch match(const CheckpointSection& section) const {
    const auto catalogued = catalogue.sections.find(section.name);
    return match_section(section, catalogued == catalogue.sections.end() ? nullptr : &catalogued->second,
                         {options.convert_dtypes, renaming(section.name)});
  }

  /// Matches the sections, and returns a match for each. A collective call: ranks may have different tensors, as stages of a
  /// pipeline have, and what is unexpected is asked for by none.
  std::vector<SectionMatch> match_with_others(const std::vector<CheckpointSection>& sections) const {
    std::vector<SectionMatch> matches(sections.size());
    std::vector<int64_t> asked;
    const auto hashes = ranks.together_with([&] {
      CatalogueEntries own;
      for (size_t i = 0; i < sections.size(); ++i) {
        matches[i] = match(sections[i]);
        own.insert(matches[i].asked.begin(), matches[i].asked.end());
      }
      asked = to_bits(catalogue, own);
      uint64_t hash = 1;
      for (const auto word : asked) hash = mixed_hash(hash, static_cast<uint64_t>(word));
      return static_cast<int64_t>(hash);
    });
    if (std::ranges::all_of(hashes, [&](const auto hash) { return hash == hashes.front(); })) return matches;
    const auto by_any = from_bits(catalogue, joined(ranks.all_gather(asked)));
    for (size_t i = 0; i < sections.size(); ++i)
      if (const auto section = catalogue.sections.find(sections[i].name); section != catalogue.sections.end())
        leave_out(by_any, section->second, matches[i].misfits);
    return matches;
  }

  std::function<std::string(const std::string&)> renaming(const std::string& section) const {
    if (section == "model") return options.rename;
    if (section != "optimizer" || !options.rename) return nullptr;
    return [&rename = options.rename](const std::string& name) {
      const auto dot = name.rfind('.');
      if (dot == std::string::npos) return name;
      const auto renamed = rename(name.substr(0, dot));
      return renamed.empty() ? renamed : renamed + name.substr(dot);
    };
  }
};

CheckpointReader::CheckpointReader(const std::string& path, const LoadCheckpointOptions& options)
    : state_(new State{RankGroup(options.world, "load_checkpoint"), options, {}}) {
  const auto& ranks = state_->ranks;
  std::string text;
  ranks.on_first([&] {
    require(options.max_extra_bytes >= kLeastExtraBytes, "load_checkpoint: max_extra_bytes is {}, expected {} or more",
            options.max_extra_bytes, kLeastExtraBytes);
    state_->catalogue = read_catalogue(path, state_->verifies(), options.follow_symlinks);
    if (ranks.size() > 1) text = to_text(state_->catalogue);
  });
  text = ranks.broadcast(text);
  if (!ranks.is_first()) state_->catalogue = catalogue_from(text);
}

CheckpointReader::~CheckpointReader() = default;

int CheckpointReader::world_size() const { return state_->catalogue.world_size; }

bool CheckpointReader::has_section(const std::string& name) const { return state_->catalogue.sections.contains(name); }

std::vector<std::string> CheckpointReader::sections() const { return keys_of(state_->catalogue.sections); }

std::vector<std::string> CheckpointReader::documents() const { return keys_of(state_->catalogue.documents); }

std::optional<std::string> CheckpointReader::document(const std::string& name) const {
  const auto found = state_->catalogue.documents.find(name);
  if (found == state_->catalogue.documents.end()) return std::nullopt;
  return found->second;
}

std::vector<CheckpointReader::TensorInfo> CheckpointReader::tensors(const std::string& section) const {
  std::vector<TensorInfo> infos;
  const auto rename = state_->renaming(section);
  if (const auto found = state_->catalogue.sections.find(section); found != state_->catalogue.sections.end())
    for (const auto& entry : found->second.tensors)
      infos.push_back({rename ? rename(entry.name) : entry.name, entry.sizes, entry.dtype,
                       state_->catalogue.files[entry.place.file].name, entry.place.offset});
  return infos;
}

std::map<std::string, std::string> CheckpointReader::other_names(const std::string& section) const {
  const auto found = state_->catalogue.sections.find(section);
  return found == state_->catalogue.sections.end() ? std::map<std::string, std::string>{} : found->second.other_names;
}

std::vector<std::string> CheckpointReader::find_damage() const {
  return fsdp::find_damage(state_->catalogue, state_->options.follow_symlinks);
}

IncompatibleKeys CheckpointReader::compare(const CheckpointSection& section) const {
  return state_->match(section).misfits;
}

IncompatibleKeys CheckpointReader::load(const std::vector<CheckpointSection>& sections, const IncompatibleKeys& besides) {
  const auto& ranks = state_->ranks;
  auto results = state_->match_with_others(sections);
  auto all = besides;
  std::vector<Match> matches;
  ranks.together([&] {
    std::string text, text_besides;
    describe(text_besides, "model", all);
    for (size_t i = 0; i < sections.size(); ++i) {
      auto& result = results[i];
      describe(text, sections[i].name, result.misfits);
      append(all.missing, result.misfits.missing);
      append(all.unexpected, result.misfits.unexpected);
      append(all.wrong, result.misfits.wrong);
      std::move(result.matches.begin(), result.matches.end(), std::back_inserter(matches));
    }
    text += text_besides;
    require(text.empty() || !state_->options.strict,
            "load_checkpoint: {} does not fit; nothing was changed.{} Set strict to false to load what fits",
            state_->catalogue.folder, text);
  });
  std::stable_sort(matches.begin(), matches.end(), [](const Match& a, const Match& b) {
    return std::tie(a.entry->place.file, a.entry->place.offset) < std::tie(b.entry->place.file, b.entry->place.offset);
  });
  load_values(ranks, state_->catalogue, matches, state_->options);
  return all;
}

std::function<std::string(const std::string&)> map_prefixes(std::map<std::string, std::string> prefixes) {
  return [prefixes = std::move(prefixes)](const std::string& name) {
    const std::pair<const std::string, std::string>* longest = nullptr;
    for (const auto& item : prefixes)
      if (name.starts_with(item.first) && (longest == nullptr || item.first.size() > longest->first.size()))
        longest = &item;
    return longest == nullptr ? name : longest->second + name.substr(longest->first.size());
  };
}

}  // namespace fsdp
