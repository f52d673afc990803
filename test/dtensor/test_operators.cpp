#include <catch2/catch.hpp>

#include <atomic>
#include <iostream>
#include <set>

#include "compare_call.hpp"
#include "excluded.hpp"
#include "support/sample.hpp"
#include "tensor/whole_tensors.hpp"

// ONE generated test over all operators of LibTorch: on DTensors each gives what it gives on whole tensors.
//   FSDP_TEST_SEED=N FSDP_TEST_OPERATOR=aten::add.out   repeats what a failure prints.
//   FSDP_TEST_DRAWINGS=N   compares N times as many drawings.
//   FSDP_TEST_SAY=1        names each operator before it runs: LibTorch crashes on some operands, and does not return from others.
namespace fsdp::test {
namespace {

class Quiet : public c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : "";
}

/// What became of all drawings.
struct Coverage {
  std::set<std::string> compared, by_another_rule;
  int64_t drawings = 0, refusals = 0;
};

/// Drawings for one operator that the plain one takes, and one that it refuses.
std::vector<SpreadCall> draw_calls(const c10::OperatorHandle& op, uint64_t seed, uint64_t first, const std::vector<int64_t>& mesh_shape,
                                   int wanted) {
  constexpr int kAttempts = 60;
  std::vector<SpreadCall> calls;
  bool has_refused = false;
  int taken = 0;
  for (int attempt = 0; attempt < kAttempts && taken < wanted; ++attempt) {
    Draw draw(first + static_cast<uint64_t>(attempt));
    try {
      auto call = spread(draw, draw_call(draw, op), mesh_shape);
      if (call.operands.empty() || call.is_unusable || (call.refuses && has_refused)) continue;
      call.seed = seed;
      has_refused |= call.refuses;
      taken += !call.refuses;
      calls.push_back(std::move(call));
    } catch (const std::exception&) {  // an out whose sizes could not be found
    }
  }
  return calls;
}

void compare_operator(const c10::OperatorHandle& op, const std::vector<SpreadCall>& calls, Coverage& coverage) {
  const auto& shape = calls[0].mesh_shape;
  std::atomic<int> by_rule = 0;
  const bool is_right = on_ranks(static_cast<int>(c10::multiply_integers(shape)), [&](Rank& rank) {
    Quiet quiet;
    const c10::WarningUtils::WarningHandlerGuard guard(&quiet);
    const auto mesh = mesh_of(rank.world(), shape);
    const SpreadCall* current = &calls[0];
    try {
      for (const auto& call : calls) {
        current = &call;
        const bool is_by_rule = compare_call(rank, mesh, call);
        if (rank.index() == 0 && is_by_rule && !call.refuses) ++by_rule;
      }
    } catch (const std::exception& error) {
      rank.check(false, current->text() + ": " + message_of(error));
      throw;
    }
  });
  for (const auto& call : calls) call.refuses ? ++coverage.refusals : ++coverage.drawings;
  const bool was_compared = std::any_of(calls.begin(), calls.end(), [](const SpreadCall& call) { return !call.refuses; });
  if (is_right && was_compared) coverage.compared.insert(base_name(op));
  if (is_right && by_rule > 0) coverage.by_another_rule.insert(base_name(op));
}

bool is_chosen(const c10::OperatorHandle& op) {
  const auto only = variable("FSDP_TEST_OPERATOR");
  if (only.empty()) return excluded().count(base_name(op)) == 0 && !is_skipped(op);
  return toString(op.operator_name()) == only || op.schema().name() == only || base_name(op) == only;
}

}  // namespace

TEST_CASE("every operator gives on DTensors what it gives on whole tensors", "[dtensor][operators]") {
  Quiet quiet;
  const c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  // Not another one each time: LibTorch does not check all operands, and some seeds crash it.
  const uint64_t seed = variable("FSDP_TEST_SEED").empty() ? 1 : draw_seed();
  const auto more = variable("FSDP_TEST_DRAWINGS");
  const int drawings = (Sample::is_thorough() ? 3 : 1) * (more.empty() ? 1 : std::stoi(more));
  const bool says_names = !variable("FSDP_TEST_SAY").empty();
  static const std::vector<std::vector<int64_t>> shapes = {{2}, {3}, {2, 2}, {4}, {1}, {1, 2}, {2, 1}};
  Coverage coverage;
  std::set<std::string> missing;
  INFO("FSDP_TEST_SEED=" << seed);
  Sample sample(1);
  for (const auto& op : operators_with_tensors()) {
    if (!is_chosen(op) || !sample.takes_next()) continue;
    missing.insert(base_name(op));
    if (says_names) std::cerr << op.operator_name() << std::endl;
    // Of its own for each operator, so that one alone can be repeated.
    Draw draw(seed + std::hash<std::string>()(toString(op.operator_name())));
    const auto& shape = needs_one_rank(op) ? shapes[4] : draw.one_of(shapes);
    const auto calls = draw_calls(op, seed, static_cast<uint64_t>(draw.between(0, 1 << 30)), shape, drawings);
    if (!calls.empty()) compare_operator(op, calls, coverage);
  }
  for (const auto& name : coverage.compared) missing.erase(name);
  int64_t public_names = 0;
  for (const auto& name : coverage.compared) public_names += is_public(name);
  std::cout << coverage.compared.size() << " compared, " << public_names << " of them public, " << coverage.by_another_rule.size()
            << " by another rule; " << coverage.drawings << " drawings, " << coverage.refusals << " refusals" << std::endl;
  std::string names;
  for (const auto& name : missing)
    if (is_public(name)) names += name + " ";
  INFO("not compared: " << names);
  if (!variable("FSDP_TEST_OPERATOR").empty()) return;
  if (!sample.takes_all()) return;
  CHECK(names == "");
  CHECK(coverage.compared.size() >= 500);
  CHECK(coverage.by_another_rule.size() >= 150);
  CHECK(excluded().size() <= 250);
}

}  // namespace fsdp::test
