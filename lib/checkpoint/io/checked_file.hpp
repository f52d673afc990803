#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/format/catalogue.hpp"
#include "checkpoint/io/file.hpp"

namespace fsdp {

/// A file whose blocks are checked as they are read: no byte is handed out from a block that does not have its sum.
/// Best read from front to back. One thread at a time.
class CheckedFile {
 public:
  /// verifies: false, or an entry without sums, reads unchecked. tensors: names what lies in bytes [begin, end), for
  /// messages. Throws CheckpointError if the file has another length than the entry says.
  CheckedFile(File file, Catalogue::DataFile entry, bool verifies,
              std::function<std::string(int64_t begin, int64_t end)> tensors = {});

  const Catalogue::DataFile& entry() const { return entry_; }
  /// Throws CheckpointError naming the file, the damaged bytes and their tensors.
  void read(int64_t offset, std::span<std::byte> into);

 private:
  struct ByteRange {
    int64_t begin, end;
  };
  ByteRange bytes_of(int64_t block) const;
  void read_part(int64_t block, int64_t offset, std::span<std::byte> part);
  std::span<const std::byte> kept_block(int64_t block);
  void check(int64_t block, uint32_t found) const;

  File file_;
  Catalogue::DataFile entry_;
  bool verifies_;
  std::function<std::string(int64_t, int64_t)> tensors_;
  std::vector<std::byte> kept_;  // the last block of which a part was asked for
  int64_t kept_index_ = -1;
  std::vector<std::byte> front_;  // what was read to be summed and is not wanted
};

}  // namespace fsdp
