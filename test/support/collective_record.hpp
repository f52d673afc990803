#pragma once

#include <fsdp/fsdp.hpp>
#include <memory>
#include <vector>

#include "fsdp/testing/recording.hpp"

namespace fsdp::test {

/// What one `on_ranks` call communicated, for a comparison of two builds: with FSDP_TEST_RECORD=FILE each call appends
/// a line a rank, the test, the call's number in it, the rank, the number of collectives and a hash of their sequence
/// (operation, subject, group, bytes, tensors), and another one that leaves the subject out. Without, nothing is recorded.
///
/// tools/same_collectives.py compares two records. Those of one build differ where a test's communication hangs on time.
class CollectiveRecord {
 public:
  explicit CollectiveRecord(int world_size);
  /// Appends the lines. On the thread that runs the tests.
  ~CollectiveRecord();
  CollectiveRecord(const CollectiveRecord&) = delete;
  CollectiveRecord& operator=(const CollectiveRecord&) = delete;

  /// `world`, of one rank, whose collectives are recorded.
  std::shared_ptr<Communicator> recorded(std::shared_ptr<Communicator> world) const;

 private:
  std::vector<std::shared_ptr<CallLog>> logs_;  // by rank; empty: nothing is recorded
};

}  // namespace fsdp::test
