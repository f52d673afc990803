#include <ATen/ATen.h>

#include <catch2/catch.hpp>
#include <fmt/format.h>

#include "comm/forwarding.hpp"
#include "comm/single_rank.hpp"
#include "fsdp/error.hpp"
#include "group/symm_mem_pool.hpp"

namespace fsdp::test {
namespace {

using Calls = std::vector<std::string>;

class PlainBuffer final : public SymmMemBuffer {
 public:
  explicit PlainBuffer(int64_t bytes) : memory_(at::empty({bytes}, at::kByte)) {}
  int64_t bytes() const override { return memory_.numel(); }
  at::Tensor take(int64_t bytes) override { return memory_.narrow(0, 0, bytes); }
  bool is_taken() const override { return false; }

 private:
  at::Tensor memory_;
};

/// Notes which buffers it has been asked for.
class MemoryRank final : public ForwardingCommunicator {
 public:
  MemoryRank() : ForwardingCommunicator(single_rank_on(c10::DeviceType::CPU)) {}
  std::shared_ptr<SymmMemBuffer> make_slot(SlotUse use, int64_t bytes) override {
    made_.push_back(fmt::format("{} of {} bytes", use == SlotUse::kGathers ? "gathers" : "reductions", bytes));
    if (fails_) throw CommError("a rank is gone");
    return has_memory_ ? std::make_shared<PlainBuffer>(bytes) : nullptr;
  }
  std::shared_ptr<Communicator> split(std::span<const int>, const std::string&) override { return nullptr; }

  const Calls& made() const { return made_; }
  void set_has_memory(bool value) { has_memory_ = value; }
  void set_fails(bool value) { fails_ = value; }

 private:
  Calls made_;
  bool has_memory_ = true, fails_ = false;
};

}  // namespace

TEST_CASE("a slot gets its buffer once, when it is first needed", "[group][symm_mem_pool]") {
  const auto comm = std::make_shared<MemoryRank>();
  SymmMemPool pool(comm, SlotUse::kReductions);
  pool.add(10);
  pool.add(20);
  CHECK(pool.size() == 2);
  CHECK(comm->made().empty());
  CHECK(pool.find(1) == nullptr);

  const auto second = pool.buffer(1);
  CHECK(second->bytes() == 20);
  CHECK(pool.buffer(1) == second);
  CHECK(pool.find(1) == second.get());
  CHECK(pool.find(0) == nullptr);
  CHECK(pool.buffer(0)->bytes() == 10);
  CHECK(comm->made() == Calls{"reductions of 20 bytes", "reductions of 10 bytes"});
}

TEST_CASE("a pool counts the bytes of buffers that are there", "[group][symm_mem_pool]") {
  const auto comm = std::make_shared<MemoryRank>();
  SymmMemPool pool(comm, SlotUse::kGathers);
  pool.add(10);
  pool.add(20);
  CHECK(pool.bytes() == 0);
  pool.buffer(1);
  CHECK(pool.bytes() == 20);
  comm->set_has_memory(false);
  CHECK(pool.buffer(0) == nullptr);
  CHECK(pool.bytes() == 20);
}

TEST_CASE("what was not made the first time is not asked for again", "[group][symm_mem_pool]") {
  // It would be a collective call that the other ranks do not make.
  const auto comm = std::make_shared<MemoryRank>();
  SymmMemPool pool(comm, SlotUse::kGathers);
  pool.add(10);
  pool.add(20);
  comm->set_has_memory(false);
  CHECK(pool.buffer(0) == nullptr);
  comm->set_has_memory(true);
  CHECK(pool.buffer(0) == nullptr);
  comm->set_fails(true);
  CHECK_THROWS_AS(pool.buffer(1), CommError);
  CHECK(pool.buffer(1) == nullptr);
  CHECK(comm->made().size() == 2);
}

TEST_CASE("a cleared pool gives back its buffers, but for what somebody holds", "[group][symm_mem_pool]") {
  const auto comm = std::make_shared<MemoryRank>();
  SymmMemPool pool(comm, SlotUse::kGathers);
  pool.add(10);
  pool.add(20);
  const std::weak_ptr<SymmMemBuffer> given_back = pool.buffer(0);
  const auto held = pool.buffer(1);
  pool.clear();
  CHECK(pool.size() == 0);
  CHECK(pool.bytes() == 0);
  CHECK(given_back.expired());
  CHECK(held->take(20).numel() == 20);

  pool.add(30);
  CHECK(pool.buffer(0)->bytes() == 30);
}

TEST_CASE("a pool keeps its communicator", "[group][symm_mem_pool]") {
  auto comm = std::make_shared<MemoryRank>();
  const std::weak_ptr<Communicator> seen = comm;
  {
    SymmMemPool pool(std::move(comm), SlotUse::kGathers);
    CHECK(!seen.expired());
  }
  CHECK(seen.expired());
}

TEST_CASE("a communicator without such memory gives no buffer", "[group][symm_mem_pool]") {
  SymmMemPool pool(single_rank_on(c10::DeviceType::CPU), SlotUse::kGathers);
  pool.add(10);
  CHECK(pool.buffer(0) == nullptr);
  CHECK(pool.bytes() == 0);
}

}  // namespace fsdp::test
