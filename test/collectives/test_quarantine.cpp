#include <catch2/catch.hpp>

#include "collectives/buffer.hpp"
#include "collectives/quarantine.hpp"
#include "comm/debug/poison.hpp"

namespace fsdp::test {
namespace {

struct Fixture {
  explicit Fixture(int64_t bytes) { quarantine = guard.quarantine = Quarantine::shared(bytes); }
  at::Tensor buffer(int64_t numel, const char* name = "buffer") const {
    const GuardedBuffers guarded(guard, name);
    return make_buffer(numel, at::kFloat);
  }
  std::vector<std::string> faults() const { return guard.faults->take(); }
  std::shared_ptr<Quarantine> quarantine;
  BufferGuard guard{.faults = std::make_shared<FaultLog>(/*rank=*/2), .quarantine = {}};
};

float* data_of(const at::Tensor& tensor) { return tensor.mutable_data_ptr<float>(); }

}  // namespace

TEST_CASE("buffers are as ever where nothing is guarded", "[collectives][quarantine]") {
  CHECK(GuardedBuffers::current() == nullptr);
  const Fixture fixture(1000);
  {
    const GuardedBuffers outer(fixture.guard, "outer");
    { const GuardedBuffers inner(fixture.guard, "inner"); }
    CHECK(GuardedBuffers::current() == &outer);
  }
  CHECK(GuardedBuffers::current() == nullptr);
  name_parts(at::ones({2}), {{0, 8, "of a tensor that is nobody's buffer"}});
}

TEST_CASE("a guarded buffer is poison when it is made and when it is gone", "[collectives][quarantine]") {
  const Fixture fixture(1000);
  auto buffer = fixture.buffer(4);
  CHECK(buffer.scalar_type() == at::kFloat);
  CHECK(buffer.isnan().all().item<bool>());
  buffer.fill_(1);
  const auto* data = data_of(buffer);
  auto view = buffer.narrow(0, 1, 2);
  buffer.reset();
  CHECK(data[0] == 1);  // a view keeps it
  view.reset();
  for (int i = 0; i < 4; ++i) CHECK(std::isnan(data[i]));
  fixture.quarantine->check(fixture.guard.faults.get());
  CHECK(fixture.faults().empty());
}

TEST_CASE("a write to released memory is reported once, by the part that was hit", "[collectives][quarantine]") {
  const Fixture fixture(1000);
  auto named = fixture.buffer(8), whole = fixture.buffer(2, "reduced gradients of 'layer1'");
  name_parts(named, {{0, 12, "a.weight"}, {16, 16, "a.bias"}});
  auto *in_bias = data_of(named) + 5, *in_whole = data_of(whole) + 1;
  named.reset();
  whole.reset();
  *in_bias = *in_whole = 0;
  const auto stranger = std::make_shared<FaultLog>(0);
  fixture.quarantine->check(stranger.get());
  CHECK(fixture.faults().empty());
  fixture.quarantine->check(fixture.guard.faults.get());
  const auto faults = fixture.faults();
  REQUIRE(faults.size() == 2);
  CHECK(faults[0].find("rank 2: parameter 'a.bias'") == 0);
  CHECK(faults[0].find("byte 4 of 16") != std::string::npos);
  CHECK(faults[1].find("reduced gradients of 'layer1'") != std::string::npos);
  fixture.quarantine->check(fixture.guard.faults.get());
  CHECK(fixture.faults().empty());
}

TEST_CASE("the quarantine keeps so many bytes, and looks at what leaves it", "[collectives][quarantine]") {
  const Fixture fixture(40);
  std::vector<float*> released;
  for (int i = 0; i < 3; ++i) {
    auto buffer = fixture.buffer(4, i == 0 ? "the first" : "a later one");
    released.push_back(data_of(buffer));
    for (int earlier = 0; earlier < i; ++earlier) CHECK(data_of(buffer) != released[earlier]);
    if (i == 2) *released[0] = 1;
    CHECK(fixture.faults().empty());
  }
  // 48 bytes are more than 40: the first has left, and was seen to be written.
  const auto faults = fixture.faults();
  REQUIRE(faults.size() == 1);
  CHECK(faults[0].find("the first") != std::string::npos);
  CHECK(std::isnan(*released[1]));
  const auto* last = [&] { return data_of(fixture.buffer(100)); }();
  CHECK(std::isnan(*last));  // one that is larger than the limit stays alone
}

TEST_CASE("the process has one quarantine for those who ask, as large as the largest wish", "[collectives][quarantine]") {
  const Fixture small(10), large(1000);
  CHECK(small.quarantine == large.quarantine);
  std::vector<float*> released;
  for (int i = 0; i < 4; ++i) released.push_back(data_of(small.buffer(20)));
  for (const auto* data : released) CHECK(std::isnan(*data));
}

}  // namespace fsdp::test
