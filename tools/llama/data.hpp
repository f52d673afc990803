#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace llama {

/// A path that cannot be used as data; the message is one line for the user.
class DataError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Text split into training and held-out files.
struct Corpus {
  std::string training, held_out;  ///< each: its files' bytes, in the order of their paths
  int training_files = 0, held_out_files = 0;
};

/// Reads a file, or every text file below a folder: hidden and binary files (a zero byte near the
/// start), `__pycache__` and `site-packages` are left out, and so are files without one of
/// `suffixes` (empty: any). A file's relative path alone decides on which side it falls, about 1 in
/// 20 being held out; of a single file, the last tenth is. The same on every machine. Throws
/// DataError naming what cannot be read, or if a side has less than `least_bytes`.
Corpus read_corpus(const std::string& path, const std::vector<std::string>& suffixes,
                   int64_t least_bytes);

/// Rows of tokens, drawn by position: row `row` of batch `step` depends on `seed`, `step` and `row`
/// alone, so however many ranks share a batch, together they see the same one.
struct RowSampler {
  uint64_t seed = 0;
  int64_t rows_per_batch = 0;  ///< over all ranks
  int64_t row_bytes = 0;

  /// Where the row starts in a text of `text_bytes`.
  int64_t start(int64_t step, int64_t row, int64_t text_bytes) const;
};

/// FNV-1a with its bits mixed: the same on every machine.
uint64_t text_hash(const std::string& text);

/// A number in [0, 1) that depends on the two arguments alone.
double uniform(uint64_t seed, uint64_t counter);

}  // namespace llama
