#include "checkpoint/plan/save_plan.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <unordered_map>

#include "base/plain_values.hpp"
#include "base/require.hpp"
#include "base/stable_hash.hpp"
#include "checkpoint/checkpoint_error.hpp"
#include "checkpoint/format/dtype_names.hpp"
#include "checkpoint/format/strict_json.hpp"

namespace fsdp {

namespace {

at::ScalarType file_dtype(const CheckpointTensor& tensor) { return tensor.dtype.value_or(tensor.local.scalar_type()); }

std::vector<SectionDescription> describe(const CheckpointParts& parts) {
  std::vector<SectionDescription> sections;
  for (const auto& section : parts.sections) {
    auto& described = sections.emplace_back(SectionDescription{section.name});
    for (const auto& tensor : section.tensors) {
      require_consistent(tensor);
      described.tensors.push_back({tensor.name, file_dtype(tensor), tensor.sizes, tensor.is_sharded, tensor.other_names});
    }
  }
  return sections;
}

std::string to_text(const std::vector<SectionDescription>& sections) {
  auto list = nlohmann::json::array();
  for (const auto& section : sections) {
    auto tensors = nlohmann::json::array();
    for (const auto& tensor : section.tensors)
      tensors.push_back({tensor.name, safetensors_dtype(tensor.dtype), tensor.sizes, tensor.is_sharded, tensor.other_names});
    list.push_back({section.name, tensors});
  }
  return dump(list, "save_checkpoint");
}

std::vector<SectionDescription> from_text(const std::string& text) {
  std::vector<SectionDescription> sections;
  for (const auto& section : nlohmann::json::parse(text)) {
    auto& described = sections.emplace_back(SectionDescription{section[0]});
    for (const auto& tensor : section[1])
      described.tensors.push_back({tensor[0], *dtype_of_safetensors(tensor[1].get<std::string>()), tensor[2], tensor[3],
                                   tensor[4]});
  }
  return sections;
}

void merge(std::vector<SectionDescription>& all, const std::vector<SectionDescription>& some, size_t rank) {
  for (const auto& section : some) {
    auto known = std::find_if(all.begin(), all.end(), [&](const auto& s) { return s.name == section.name; });
    if (known == all.end()) known = all.insert(all.end(), SectionDescription{section.name});
    std::unordered_map<std::string, size_t> positions;
    for (size_t i = 0; i < known->tensors.size(); ++i) positions[known->tensors[i].name] = i;
    for (const auto& tensor : section.tensors) {
      const auto [position, is_new] = positions.emplace(tensor.name, known->tensors.size());
      if (is_new) {
        known->tensors.push_back(tensor);
        continue;
      }
      const auto& other = known->tensors[position->second];
      require(other == tensor,
              "save_checkpoint: '{}' is {} ({}) on rank {}, but {} ({}) on a lower rank, or it has other names there; "
              "different tensors need different names",
              tensor.name, safetensors_dtype(tensor.dtype), fmt::join(tensor.sizes, ", "), rank,
              safetensors_dtype(other.dtype), fmt::join(other.sizes, ", "));
    }
  }
}

/// Everything that any rank has.
std::vector<SectionDescription> agree(const RankGroup& ranks, std::vector<SectionDescription> own) {
  const auto texts = ranks.all_gather_different(to_text(own));
  if (texts.empty()) return own;
  std::vector<SectionDescription> all;
  for (size_t rank = 0; rank < texts.size(); ++rank) merge(all, from_text(texts[rank]), rank);
  return all;
}

/// Three numbers that say what a rank holds of a tensor: a hash of its elements, how many they are, and their edges.
constexpr size_t kNumbers = 3;

int64_t hash_of(const std::vector<ElementRange>& ranges) {
  uint64_t hash = 1;
  for (const auto& range : ranges)
    hash = mixed_hash(mixed_hash(hash, static_cast<uint64_t>(range.begin)), static_cast<uint64_t>(range.end));
  return static_cast<int64_t>(hash);
}

uint64_t edge_at(int64_t element) { return mixed_hash(0, static_cast<uint64_t>(element)); }

/// Ends less begins. Where ranges tile a tensor every inner edge is an end and a begin, and cancels in the sum; ranges
/// that overlap in one place and leave a gap in another have as many elements, but other edges.
uint64_t edges_of(const std::vector<ElementRange>& ranges) {
  uint64_t sum = 0;
  for (const auto& range : ranges) sum += edge_at(range.end) - edge_at(range.begin);
  return sum;
}

/// This rank's share of what the ranks hold of one tensor. number: the tensor's, counted over all sections.
Positions share(const TensorDescription& tensor, size_t number, size_t rank, const std::vector<std::vector<int64_t>>& held) {
  const int64_t numel = checked_numel(tensor.sizes, tensor.name);
  const auto hash = [&](size_t r) { return held[r][kNumbers * number]; };
  const auto count = [&](size_t r) { return held[r][kNumbers * number + 1]; };
  if (numel == 0) return {};
  if (!tensor.is_sharded) {
    size_t first = 0;
    while (count(first) == 0) ++first;
    return first == rank ? Positions{0, numel} : Positions{};
  }
  std::map<int64_t, int64_t> distinct;
  int64_t sharers = 0, index = 0, total = 0;
  uint64_t edges = 0;
  for (size_t r = 0; r < held.size(); ++r) {
    if (count(r) == 0) continue;
    if (distinct.emplace(hash(r), count(r)).second) {
      total += count(r);
      edges += static_cast<uint64_t>(held[r][kNumbers * number + 2]);
    }
    if (hash(r) != hash(rank)) continue;
    if (r < rank) ++index;
    ++sharers;
  }
  require(total >= numel,
          "save_checkpoint: the ranks hold {} of the {} elements of '{}'; the process group (`world`) must have all ranks that "
          "hold a part of the model",
          total, numel, tensor.name);
  require(total == numel,
          "save_checkpoint: the ranks hold {} elements of '{}', which has {}; different tensors, such as experts on other "
          "ranks, need different names",
          total, tensor.name, numel);
  require(edges == edge_at(numel) - edge_at(0),
          "save_checkpoint: the ranks' parts of '{}' overlap in some elements and leave out others; expected parts that are "
          "equal or do not overlap", tensor.name);
  if (count(rank) == 0) return {};
  return share_of(count(rank), static_cast<int64_t>(c10::elementSize(tensor.dtype)), sharers, index,
                  static_cast<int64_t>(number));
}

}  // namespace

void require_consistent(const CheckpointTensor& tensor) {
  require(tensor.local.defined(), "checkpoint: '{}' is undefined", tensor.name);
  require(!tensor.local.is_meta(), "checkpoint: '{}' is on the meta device and has no values; materialise it first",
          tensor.name);
  require(tensor.local.layout() == at::kStrided, "checkpoint: '{}' is sparse; make it dense first", tensor.name);
  require(is_plain(tensor.local) || tensor.local.is_conj() || tensor.local.is_neg(),
          "checkpoint: '{}' is {}; expected a plain tensor. Convert it to one first", tensor.name, what_it_is(tensor.local));
  if (!tensor.is_sharded) {
    require(tensor.local.sizes() == c10::IntArrayRef(tensor.sizes), "checkpoint: '{}' has sizes ({}), expected ({})",
            tensor.name, fmt::join(tensor.local.sizes(), ", "), fmt::join(tensor.sizes, ", "));
    return;
  }
  const int64_t numel = checked_numel(tensor.sizes, tensor.name);
  int64_t count = 0;
  for (const auto& range : tensor.ranges) {
    require(0 <= range.begin && range.begin <= range.end && range.end <= numel,
            "checkpoint: '{}' has {} elements, a range goes from {} to {}", tensor.name, numel, range.begin, range.end);
    count += range.count();
  }
  require(count == tensor.local.numel(), "checkpoint: the ranges of '{}' have {} elements, its local tensor {}", tensor.name,
          count, tensor.local.numel());
}

std::vector<ElementRange> held_ranges(const CheckpointTensor& tensor) {
  return tensor.is_sharded ? tensor.ranges : std::vector<ElementRange>{{0, tensor.local.numel()}};
}

SavePlan plan_save(const RankGroup& ranks, const CheckpointParts& parts, int64_t max_file_bytes) {
  std::vector<SectionDescription> sections;
  ranks.together([&] {
    sections = describe(parts);
    to_text(sections);  // dtypes and names that the format does not have
  });
  sections = agree(ranks, std::move(sections));

  SavePlan plan;
  plan.files = plan_files(sections, max_file_bytes);
  std::map<std::pair<std::string, std::string>, const CheckpointTensor*> own;
  for (const auto& section : parts.sections)
    for (const auto& tensor : section.tensors) own[{section.name, tensor.name}] = &tensor;
  std::vector<int64_t> numbers;
  for (const auto& section : sections)
    for (const auto& tensor : section.tensors) {
      const auto found = own.find({section.name, tensor.name});
      const auto ranges = found == own.end() ? std::vector<ElementRange>{} : held_ranges(*found->second);
      numbers.push_back(hash_of(ranges));
      numbers.push_back(found == own.end() ? 0 : found->second->local.numel());
      numbers.push_back(static_cast<int64_t>(edges_of(ranges)));
    }
  const auto held = ranks.all_gather(numbers);

  size_t number = 0;
  for (size_t s = 0; s < sections.size(); ++s)
    for (size_t t = 0; t < sections[s].tensors.size(); ++t, ++number) {
      const auto& tensor = sections[s].tensors[t];
      const auto positions = share(tensor, number, ranks.rank(), held);
      const auto found = own.find({sections[s].name, tensor.name});
      if (found == own.end()) continue;
      plan.tensors.push_back(found->second);
      plan.dtypes.push_back(tensor.dtype);
      add_pieces(plan.pieces, plan.tensors.size() - 1, held_ranges(*found->second), positions, plan.files.places[s][t],
                 static_cast<int64_t>(c10::elementSize(tensor.dtype)));
    }
  sort(plan.pieces);
  return plan;
}

}  // namespace fsdp
