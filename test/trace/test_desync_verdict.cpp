#include <catch2/catch.hpp>

#include "comm/forwarding.hpp"
#include "comm/single_rank.hpp"
#include "trace/desync/verdict/desync_verdict.hpp"

namespace fsdp::test {
namespace {

/// Writes down why it was aborted.
class AbortedGroup final : public ForwardingCommunicator {
 public:
  explicit AbortedGroup(std::vector<std::string>& reasons)
      : ForwardingCommunicator(single_rank_on(c10::DeviceType::CPU)), reasons_(reasons) {}
  void abort(const std::string& reason) override { reasons_.push_back(reason); }
  std::shared_ptr<Communicator> split(std::span<const int> ranks, const std::string& name) override {
    return inner().split(ranks, name);
  }

 private:
  std::vector<std::string>& reasons_;
};

}  // namespace

TEST_CASE("of verdicts the first stays", "[group][desync_verdict]") {
  DesyncVerdict verdict;
  CHECK_FALSE(verdict.is_given());
  verdict.give({.text = "rank 1 took another branch"});
  verdict.give({.text = "another"});
  CHECK(verdict.is_given());
  CHECK(verdict.get().text == "rank 1 took another branch");
}

TEST_CASE("a verdict travels as one text, whatever modules are called", "[group][desync_verdict]") {
  const Verdict verdict{"they \"disagree\"\n  rank 1: x", {.collective = 7, .launched = {{0, "all_gather of {a\\b}"}, {12, ""}}}};
  const auto same = Verdict::decode(verdict.encode());
  CHECK(same.text == verdict.text);
  CHECK(same.difference.collective == 7);
  CHECK(same.difference.launched == verdict.difference.launched);
  const auto bare = Verdict::decode(Verdict{.text = "values differ"}.encode());
  CHECK(bare.text == "values differ");
  CHECK_FALSE(bare.difference.collective.has_value());
  CHECK_NOTHROW(Verdict{.text = "no UTF-8: \xff"}.encode());
}

TEST_CASE("a text that is no verdict's is taken as it is", "[group][desync_verdict]") {
  for (const char* text : {"the ranks disagree", "", "[1]", "{\"launched\": []}"}) CHECK(Verdict::decode(text).text == text);
}

TEST_CASE("a verdict fails each communicator that is still there, once", "[group][desync_verdict]") {
  std::vector<std::string> first, second, gone;
  const auto one = std::make_shared<AbortedGroup>(first), other = std::make_shared<AbortedGroup>(second);
  auto old = std::make_shared<AbortedGroup>(gone);
  DesyncVerdict verdict;
  for (int i = 0; i < 2; ++i)
    for (Communicator* group : {static_cast<Communicator*>(one.get()), static_cast<Communicator*>(other.get()),
                                static_cast<Communicator*>(old.get())})
      verdict.add(*group);
  old.reset();
  verdict.give({.text = "they disagree"});
  CHECK(first == std::vector<std::string>{"they disagree"});
  CHECK(second == first);
  CHECK(gone.empty());
}

}  // namespace fsdp::test
