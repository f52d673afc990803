#include "property/byte_budgets.hpp"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "property/run_watch.hpp"

namespace fsdp::test {
namespace {

constexpr auto kSaysBytes = "set_unsharded_byte_budget: expected ";

/// The number behind the first `text` in `message`; -1: there is none.
int64_t number_behind(const std::string& message, const std::string& text) {
  const auto place = message.find(text);
  return place == std::string::npos ? -1 : std::strtoll(message.c_str() + place + text.size(), nullptr, 10);
}

std::vector<int64_t> bytes_of(const std::vector<PlainGroup>& groups) {
  std::vector<int64_t> bytes;
  // One of no bytes, of slices without elements, is to be seen on such a rank as on the others.
  for (const auto& group : groups) bytes.push_back(std::max<int64_t>(gathered_by(group).padded, 1));
  return bytes;
}

}  // namespace

ByteBudgets::ByteBudgets(const Rank& rank, const torch::nn::Module& model,
                         std::shared_ptr<const std::vector<PlainGroup>> groups, const RandomTree& tree,
                         const std::vector<at::Tensor>& hooked)
    : rank_(rank), groups_(std::move(groups)), roots_(roots(model)), buffers_(model.buffers()),
      at_once_(bytes_of(*groups_)),
      is_drawn_(tree.draws_budgets), draw_(tree.seed * 86028121 + 19) {
  follow_operators();
  for (const auto& group : *groups_) {
    const int64_t bytes = gathered_by(group).padded;
    bytes_by_name_[subject_of(group)] = bytes;
    all_ += bytes;
    for (const auto& param : group.params)
      if (!param.is_gone && is_among(param.tensor, hooked)) read_by_hook_ = std::max(read_by_hook_, bytes);
  }
  if (roots_.size() == 1) held_ = parameter_bytes(roots_.front()).unsharded;
  if (!is_drawn_) return;
  least_ = find_least();
  int64_t at_least = 0, at_most = 0;
  for (const auto& group : *groups_) {
    const int64_t bytes = gathered_by(group).padded;
    at_most = std::max(at_most, bytes);
    if (group.ranks > 1) at_least = std::max(at_least, bytes);  // one rank's may be never gathered
  }
  rank.check(least_ >= at_least && least_ <= at_most,
             fmt::format("the least budget is {} bytes, the formula says {} to {}", least_, at_least, at_most));
}

void ByteBudgets::follow_operators() {
  OperandsAtOnce::GroupOf group_of;
  for (size_t g = 0; g < groups_->size(); ++g)
    for (const auto& param : (*groups_)[g].params) {
      if (param.is_gone) continue;
      group_of[param.tensor.storage().unsafeGetStorageImpl()] = g;
      group_of[sharded(param.tensor).unsafeGetTensorImpl()] = g;
    }
  at_once_.set_groups(std::move(group_of));
}

int64_t ByteBudgets::find_least() {
  auto& root = roots_.front();
  try {
    root.set_unsharded_byte_budget(0);
    root.set_unsharded_byte_budget(std::nullopt);
    return 0;
  } catch (const UsageError& error) {
    const int64_t least = number_behind(message_of(error), kSaysBytes);
    rank_.check_throws<UsageError>([&] { root.set_unsharded_byte_budget(least - 1); }, {kSaysBytes}, "less than the largest");
    root.set_unsharded_byte_budget(least);
    root.set_unsharded_byte_budget(std::nullopt);
    return least;
  }
}

void ByteBudgets::note_range(std::string_view name) {
  for (const auto& [begins, sign] : {std::pair<std::string_view, int64_t>{"FSDP::all_gather (", 1}, {"FSDP::reshard (", -1}}) {
    if (!name.starts_with(begins)) continue;
    const auto found = bytes_by_name_.find(name.substr(begins.size(), name.size() - begins.size() - 1));
    if (found == bytes_by_name_.end()) continue;
    held_ += sign * found->second;
    if (sign > 0) most_held_ = std::max(most_held_, held_);
  }
}

void ByteBudgets::check(const std::string& when) {
  const int64_t together = at_once_.take() + read_by_hook_, most = std::exchange(most_held_, 0);
  follow_operators();
  if (roots_.size() > 1) return;  // which may have groups of one name
  const auto budget = roots_.front().report().budget_bytes;
  if (!budget) return;
  rank_.check(most <= std::max(*budget, together),
              fmt::format("{}: held {} bytes under a budget of {}, where no operator reads more than {} together", when, most,
                          *budget, together));
}

/// All ranks draw the same, though groups of slices may be of other sizes on some.
void ByteBudgets::draw_next() {
  if (!is_drawn_ || !draw_.chance(0.7)) return;
  auto& root = roots_.front();
  const int64_t kind = draw_.number(0, 5), thousandths = draw_.number(0, 1000);
  switch (kind) {
    case 0: return root.set_unsharded_byte_budget(std::nullopt);
    case 1: return root.set_unsharded_byte_budget(least_);
    case 2:
      if (least_ > 0)
        rank_.check_throws<UsageError>([&] { root.set_unsharded_byte_budget((least_ - 1) * thousandths / 1000); },
                                       {kSaysBytes}, "far too small");
      return;
    case 3: return root.set_unsharded_byte_budget(2 * all_ + 1);
    default: return root.set_unsharded_byte_budget(least_ + std::max<int64_t>(all_ - least_, 0) * thousandths / 1000);
  }
}

void ByteBudgets::check_refused(const std::string& message, int64_t unsharded_before) {
  const auto budget = roots_.front().report().budget_bytes;
  rank_.check(is_drawn_ && budget && message.find("unsharded byte budget: " + std::to_string(*budget) + " bytes") != std::string::npos,
              "a forward was refused: " + message);
  rank_.check(parameter_bytes(roots_.front()).unsharded <= unsharded_before, "it was refused after it had begun");
}

at::Tensor ByteBudgets::forward(const std::function<at::Tensor()>& run) {
  if (!is_drawn_) return run();
  auto& root = roots_.front();
  const int64_t before = parameter_bytes(root).unsharded;
  std::vector<at::Tensor> statistics;
  for (const auto& buffer : buffers_) statistics.push_back(buffer.clone());
  try {
    return run();
  } catch (const StateError& error) {
    check_refused(message_of(error), before);
    // What ran in front of the refusal has counted its batch.
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < buffers_.size(); ++i) buffers_[i].copy_(statistics[i]);
    root.set_unsharded_byte_budget(root.report().budget_bytes.value_or(0) + number_behind(message_of(error), "bytes are "));
  }
  return run();
}

void ByteBudgets::check_row(const BudgetOutlook& row, const std::function<void()>& run_step, int64_t& gathered_before) {
  auto& root = roots_.front();
  root.set_unsharded_byte_budget(row.budget_bytes);
  for (int step = 0; step < 2; ++step) {
    run_step();
    check(fmt::format("a step under a budget of {}", row.budget_bytes));
  }
  const auto found = root.report();
  const auto what = fmt::format("budget {}", row.budget_bytes);
  rank_.check_equal(found.last_step.all_gathers, row.all_gathers, what + ": gathers");
  rank_.check_equal(found.last_step.gathered_bytes, row.gathered_bytes, what + ": gathered bytes");
  rank_.check_equal(found.planned_gathered_bytes, row.gathered_bytes, what + ": planned");
  rank_.check(row.gathered_bytes <= gathered_before,
              fmt::format("{}: {} bytes are gathered, under a smaller one {}", what, row.gathered_bytes, gathered_before));
  gathered_before = row.gathered_bytes;
}

void ByteBudgets::check_outlook(const Step& step) {
  if (!is_drawn_) return;
  check("the last step");
  auto& root = roots_.front();
  root.set_unsharded_byte_budget(std::nullopt);
  bool reads_in_backward = false;
  const auto run_step = [&] {
    const auto loss = step.forward();
    const int64_t in_forward = at_once_.take();
    loss.backward();
    const int64_t in_backward = at_once_.take();
    reads_in_backward = in_backward > 0;
    at_once_.note(std::max(in_forward, in_backward));
    step.end();
  };
  for (int i = 0; i < 2; ++i) run_step();
  check("without a budget");
  const auto outlook = root.report().outlook;
  if (outlook.empty() || !reads_in_backward) return;  // whose order is that of a step before, then
  std::vector<int64_t> rows;
  for (int i = 0; i < 3; ++i) rows.push_back(draw_.number(0, 7));
  std::ranges::sort(rows);
  int64_t before = INT64_MAX;
  for (const int64_t row : rows)
    check_row(outlook[static_cast<size_t>(std::min(row, static_cast<int64_t>(outlook.size()) - 1))], run_step, before);
}

}  // namespace fsdp::test
