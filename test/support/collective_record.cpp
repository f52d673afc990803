#include "support/collective_record.hpp"

#include <catch2/catch.hpp>
#include <fmt/format.h>

#include <cstdlib>
#include <fstream>
#include <map>
#include <string>

namespace fsdp::test {
namespace {

const char* record_file() {
  const char* file = std::getenv("FSDP_TEST_RECORD");
  return file != nullptr && *file != '\0' ? file : nullptr;
}

enum class Subjects { kHashed, kLeftOut };

/// FNV-1a: the same on every machine.
uint64_t hash_of(const CallLog& log, Subjects subjects) {
  uint64_t hash = 0xCBF29CE484222325ULL;
  for (const auto& call : log.calls)
    for (const unsigned char c : fmt::format("{}|{}|{}|{}|{};", call.operation,
                                             subjects == Subjects::kHashed ? call.subject : std::string(), call.group, call.bytes,
                                             call.tensors))
      hash = (hash ^ c) * 0x100000001B3ULL;
  return hash;
}

}  // namespace

CollectiveRecord::CollectiveRecord(int world_size) {
  if (record_file() == nullptr) return;
  for (int rank = 0; rank < world_size; ++rank) logs_.push_back(std::make_shared<CallLog>());
}

CollectiveRecord::~CollectiveRecord() {
  if (logs_.empty()) return;
  static std::map<std::string, int> calls_of_test;
  const auto test = Catch::getResultCapture().getCurrentTestName();
  const int number = ++calls_of_test[test];
  std::ofstream file(record_file(), std::ios::app);
  for (size_t rank = 0; rank < logs_.size(); ++rank)
    file << fmt::format("{} #{} rank {}: {} {:016x} {:016x}\n", test, number, rank, logs_[rank]->calls.size(),
                        hash_of(*logs_[rank], Subjects::kHashed), hash_of(*logs_[rank], Subjects::kLeftOut));
}

std::shared_ptr<Communicator> CollectiveRecord::recorded(std::shared_ptr<Communicator> world) const {
  if (logs_.empty()) return world;
  const auto rank = static_cast<size_t>(world->rank());
  return recording(std::move(world), logs_[rank]);
}

}  // namespace fsdp::test
