#include "checkpoint/plan/load_plan.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <set>
#include <unordered_map>

#include "base/require.hpp"
#include "checkpoint/format/dtype_names.hpp"
#include "checkpoint/plan/save_plan.hpp"

namespace fsdp {

namespace {

/// The checkpoint's tensors by the names that the model has for them.
class Names {
 public:
  Names(const Catalogue::Section& section, const std::function<std::string(const std::string&)>& rename) {
    const auto renamed = [&](const std::string& name) { return rename ? rename(name) : name; };
    std::unordered_map<std::string, const Catalogue::TensorEntry*> saved;
    for (const auto& entry : section.tensors) {
      saved[entry.name] = &entry;
      const auto name = renamed(entry.name);
      if (name.empty()) continue;
      const auto [known, is_new] = entries_.emplace(name, &entry);
      require(is_new, "load_checkpoint: '{}' and '{}' of the checkpoint are both renamed to '{}'", known->second->name,
              entry.name, name);
    }
    for (const auto& [other, name] : section.other_names)
      if (const auto entry = saved.find(name); entry != saved.end())
        if (auto key = renamed(other); !key.empty()) entries_.emplace(std::move(key), entry->second);
  }

  const Catalogue::TensorEntry* find(const CheckpointTensor& tensor) const {
    if (const auto found = entries_.find(tensor.name); found != entries_.end()) return found->second;
    for (const auto& name : tensor.other_names)
      if (const auto found = entries_.find(name); found != entries_.end()) return found->second;
    return nullptr;
  }

  /// Names of tensors that are left in the end, in the order of their names.
  std::vector<std::string> unused(const CatalogueEntries& used) const {
    std::set<std::string> names;
    for (const auto& [name, entry] : entries_)
      if (!used.contains(entry)) names.insert("'" + entry->name + "'");
    return {names.begin(), names.end()};
  }

 private:
  std::unordered_map<std::string, const Catalogue::TensorEntry*> entries_;
};

}  // namespace

std::vector<FilePiece> pieces_of(const Match& match) {
  std::vector<FilePiece> pieces;
  add_pieces(pieces, 0, held_ranges(*match.tensor), {0, match.tensor->local.numel()}, match.entry->place,
             static_cast<int64_t>(c10::elementSize(match.entry->dtype)));
  sort(pieces);
  return pieces;
}

std::string misfit(const CheckpointTensor& tensor, c10::IntArrayRef saved_sizes, at::ScalarType saved, bool converts) {
  if (saved_sizes != c10::IntArrayRef(tensor.sizes))
    return fmt::format("has sizes ({}), expected ({})", fmt::join(saved_sizes, ", "), fmt::join(tensor.sizes, ", "));
  const auto local = tensor.local.scalar_type(), expected = tensor.dtype.value_or(local);
  if (saved == expected) return "";
  const auto what = fmt::format("is {}, expected {}", safetensors_dtype(saved), safetensors_dtype(expected));
  if (!converts) return what + " (convert_dtypes is not set)";
  return c10::canCast(saved, local) ? "" : what + ", to which it cannot be converted";
}

SectionMatch match_section(const CheckpointSection& section, const Catalogue::Section* catalogued,
                           const MatchOptions& options) {
  static const Catalogue::Section kNone;
  const Names names(catalogued != nullptr ? *catalogued : kNone, options.rename);
  SectionMatch result;
  for (const auto& tensor : section.tensors) {
    require_consistent(tensor);
    const auto* entry = names.find(tensor);
    if (entry == nullptr) {
      result.misfits.missing.push_back("'" + tensor.name + "'");
      continue;
    }
    result.asked.insert(entry);
    if (const auto wrong = misfit(tensor, entry->sizes, entry->dtype, options.convert_dtypes); !wrong.empty()) {
      result.misfits.wrong.push_back("'" + tensor.name + "' " + wrong);
      continue;
    }
    result.matches.push_back({.tensor = &tensor, .entry = entry});
  }
  result.misfits.unexpected = names.unused(result.asked);
  return result;
}

std::string tensors_in(const Catalogue& catalogue, size_t file, int64_t begin, int64_t end) {
  constexpr size_t kShown = 4;
  std::vector<std::string> names;
  for (const auto& [section, contents] : catalogue.sections)
    for (const auto& tensor : contents.tensors)
      if (tensor.place.file == file && tensor.place.offset < end && begin < tensor.place.offset + tensor.place.bytes)
        names.push_back("'" + tensor.name + "'");
  if (names.empty()) return "; they are the header";
  const size_t more = names.size() > kShown ? names.size() - kShown : 0;
  names.resize(names.size() - more);
  return fmt::format("; they belong to {}{}", fmt::join(names, ", "), more > 0 ? fmt::format(" and {} others", more) : "");
}

}  // namespace fsdp
