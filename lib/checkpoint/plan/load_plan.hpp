#pragma once

#include <functional>
#include <string>
#include <vector>

#include "checkpoint/format/catalogue.hpp"
#include "checkpoint/format/entry_bits.hpp"
#include "checkpoint/plan/pieces.hpp"
#include "fsdp/checkpoint_parts.hpp"

namespace fsdp {

/// A tensor of this rank with what the checkpoint has for it.
struct Match {
  const CheckpointTensor* tensor;
  const Catalogue::TensorEntry* entry;
};

/// What this rank reads for a match, in the order of the file. Made for one tensor at a time: cut along another
/// dimension than the first, a tensor has a piece for each row.
std::vector<FilePiece> pieces_of(const Match& match);

struct SectionMatch {
  std::vector<Match> matches = {};
  CatalogueEntries asked = {};  ///< for which there is a tensor, whether it fits or not
  IncompatibleKeys misfits = {};
};

struct MatchOptions {
  bool convert_dtypes = false;
  std::function<std::string(const std::string&)> rename = {};
};

/// catalogued: null where the checkpoint has no such section. Throws UsageError if `rename` gives two tensors one name,
/// or a tensor is not what it says itself.
SectionMatch match_section(const CheckpointSection& section, const Catalogue::Section* catalogued,
                           const MatchOptions& options);

/// Why what was saved cannot be loaded into `tensor`: "has sizes (3, 4), expected (4, 4)". Empty: it can.
std::string misfit(const CheckpointTensor& tensor, c10::IntArrayRef saved_sizes, at::ScalarType saved, bool converts);

/// "; they belong to 'a', 'b' and 3 others": what lies in bytes [begin, end) of a file.
std::string tensors_in(const Catalogue& catalogue, size_t file, int64_t begin, int64_t end);

}  // namespace fsdp
