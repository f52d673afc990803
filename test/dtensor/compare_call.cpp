#include "compare_call.hpp"

#include <cstdlib>
#include <functional>
#include <iostream>

#include "dtensor/rules/propagate.hpp"
#include "excluded.hpp"

namespace fsdp::test {

namespace {

/// Which of the ranks that share a piece this one is.
int64_t summand_index(const DeviceMesh& mesh, const std::vector<Placement>& placements) {
  int64_t index = 0;
  for (int m = 0; m < mesh.ndim(); ++m)
    if (std::holds_alternative<Partial>(placements[static_cast<size_t>(m)]))
      index = index * mesh.size(m) + mesh.get_local_rank(m);
  return index;
}

/// Summands of a Partial tensor: 1 on each rank but the first, which has what is left.
at::Tensor distributed(const Operand& operand, const DeviceMesh& mesh) {
  auto cuts = operand.placements;
  int64_t summands = 1;
  bool is_partial = false;
  for (size_t m = 0; m < cuts.size(); ++m)
    if (std::holds_alternative<Partial>(cuts[m])) {
      is_partial = true;
      summands *= mesh.shape()[m];
      cuts[m] = Replicate{};
    }
  if (!is_partial) return distribute_tensor(operand.base, mesh, cuts);
  const auto summand = summand_index(mesh, operand.placements) == 0 ? operand.base - (summands - 1) : at::ones_like(operand.base);
  const auto local = distribute_tensor(summand, mesh, cuts).to_local();
  return DTensor::from_local(local, mesh, operand.placements, operand.base.sizes(),
                             operand.base.is_non_overlapping_and_dense() ? at::OptionalIntArrayRef(operand.base.strides()) : std::nullopt);
}

int64_t general_calls() {
  int64_t sum = 0;
  for (const auto& [name, count] : general_rule_counts()) sum += count;
  return sum;
}

/// All ranks are here. What they say is summed up.
int64_t agree(const Rank& rank, int64_t said) {
  const auto all = torch::empty({rank.size()}, torch::kLong);
  rank.world()->start_all_gather(all, torch::tensor({said}), "agree")->wait();
  return all.sum().item<int64_t>();
}

void check(const Rank& rank, bool condition, const std::function<std::string()>& what) {
  if (condition) return rank.check(true, "");
  const auto text = what();
  if (std::getenv("FSDP_TEST_SAY") != nullptr) std::cerr << fmt::format("WRONG rank {}: {}\n", rank.index(), text);
  rank.check(false, text);
}

struct OnRank {
  std::vector<at::Tensor> tensors, bases;
  std::vector<int64_t> versions;  ///< of the bases, before the call

  OnRank(const SpreadCall& call, const DeviceMesh& mesh) {
    for (const auto& operand : call.operands) {
      if (operand.same_as) {
        tensors.push_back(tensors[*operand.same_as]), bases.push_back(bases[*operand.same_as]);
        continue;
      }
      bases.push_back(operand.is_dtensor ? distributed(operand, mesh) : operand.base.clone());
      tensors.push_back(operand.viewed(bases.back()));
    }
    for (const auto& base : bases) versions.push_back(static_cast<int64_t>(base._version()));
  }

  /// A bit for each operand.
  int64_t written() const {
    int64_t bits = 0;
    for (size_t i = 0; i < bases.size(); ++i)
      if (static_cast<int64_t>(bases[i]._version()) != versions[i]) bits |= int64_t{1} << i;
    return bits;
  }
};

void compare_results(const Rank& rank, const SpreadCall& call, const OnRank& on, const torch::jit::Stack& results) {
  const auto say = [&](const std::string& what, const std::optional<std::string>& text) {
    check(rank, !text, [&] { return fmt::format("{}: {}: {}", call.text(), what, *text); });
  };
  const bool has_values = !leaves_values_open(call.drawn.op);
  check(rank, results.size() == call.results.size(), [&] { return call.text() + ": another number of results"; });
  for (size_t i = 0; i < results.size() && i < call.results.size(); ++i)
    say(fmt::format("result {}", i), difference(results[i], call.results[i], has_values));
  const auto tensors = tensors_of(results);
  for (size_t i = 0; i < tensors.size() && i < call.result_is.size(); ++i)
    if (call.result_is[i] >= 0 && is_written_result(call.drawn.op, i))
      check(rank, tensors[i].is_same(on.tensors[static_cast<size_t>(call.result_is[i])]),
            [&] { return fmt::format("{}: result {} is not the operand that was written", call.text(), i); });
  for (size_t i = 0; i < on.bases.size(); ++i)
    say(fmt::format("operand {} afterwards", i), difference(on.bases[i], call.bases[i], has_values));
  if (call.bases_written_through.empty() || shows_no_memory(call.drawn.op) || tensors.empty()) return;
  tensors[0].fill_(3);
  for (size_t i = 0; i < on.bases.size(); ++i)
    say(fmt::format("operand {} after its view was filled", i), difference(on.bases[i], call.bases_written_through[i], has_values));
}

}  // namespace

bool compare_call(const Rank& rank, const DeviceMesh& mesh, const SpreadCall& call) {
  const OnRank on(call, mesh);
  for (size_t i = 0; i < on.tensors.size(); ++i)
    check(rank, on.tensors[i].sizes() == c10::IntArrayRef(call.operands[i].sizes),
          [&] { return call.text() + ": the operand has other sizes"; });
  agree(rank, 0);
  const int64_t before = general_calls();
  agree(rank, 0);
  torch::jit::Stack results;
  std::string refusal;
  try {
    results = run_operator(call, with_tensors(call, on.tensors));
  } catch (const CommError&) {
    throw;
  } catch (const std::exception& error) {
    refusal = message_of(error);
  }
  const int64_t refused = agree(rank, refusal.empty() ? 0 : 1);
  const bool is_by_rule = general_calls() == before;
  agree(rank, 0);
  check(rank, refused == 0 || refused == rank.size(),
        [&] { return fmt::format("{}: {} ranks refused: {}", call.text(), refused, refusal); });
  check(rank, (refused > 0) == call.refuses,
        [&] { return call.text() + (refused > 0 ? ": refused: " + refusal : ": is not refused"); });
  // A group gathers a parameter anew that has another version: all ranks, or none.
  const int64_t written = refused == 0 ? on.written() : 0;
  check(rank, agree(rank, written) == written * rank.size(),
        [&] { return fmt::format("{}: other ranks see other operands as written", call.text()); });
  if (refused == 0 && !call.refuses) compare_results(rank, call, on, results);
  return is_by_rule;
}

}  // namespace fsdp::test
