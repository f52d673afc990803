#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "fsdp/communicator.hpp"
#include "fsdp/error.hpp"

namespace fsdp {

/// A Work that is done: one object for the whole process, so that returning it costs nothing.
const std::shared_ptr<Work>& completed_work();

/// What an error says about the collective that failed. Kept by value: an error may outlive its
/// group.
struct CollectiveInfo {
  const char* operation;  ///< a literal, such as "all_gather"
  std::string subject;
  std::string group;
  int rank = 0;
  int size = 1;
  int64_t bytes = 0;  ///< of the full buffer

  CollectiveInfo(const char* operation, std::string_view subject, const Communicator& comm,
                 int64_t bytes)
      : operation(operation),
        subject(subject),
        group(comm.name()),
        rank(comm.rank()),
        size(comm.size()),
        bytes(bytes) {}

  CollectiveInfo(const char* operation, std::string_view subject, std::string group, int rank, int size, int64_t bytes)
      : operation(operation), subject(subject), group(std::move(group)), rank(rank), size(size), bytes(bytes) {}

  FailedOperation failed() const { return {operation, subject, group, rank, size}; }
  /// "all_gather of 'blocks.3' (12,345 bytes) in group 'shard[0,1]' on rank 0 of 2".
  std::string describe() const;
  /// describe() + " failed: " + reason, as a CommError.
  [[noreturn]] void fail(std::string_view reason) const;
};

/// "12,345".
std::string with_separators(int64_t value);

}  // namespace fsdp
