#include "property/run_watch.hpp"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <set>
#include <span>

#include "property/runtime_allocations.hpp"

namespace fsdp::test {
namespace {

using Groups = std::vector<PlainGroup>;
// In the log, besides the collectives: a micro-batch begins, a gradient has arrived at an unsharded parameter, a group begins to
// reduce, or to gather, a parameter has been thawed, or frozen, or its gradient's dtypes are these.
constexpr auto kMicroBatch = "micro-batch", kGradient = "gradient", kReduction = "reduction", kGather = "gather",
               kThawed = "thawed", kFrozen = "frozen", kReducedIn = "reduced in", kKeptIn = "kept in";

at::ScalarType dtype_named(const std::string& name) {
  for (const auto dtype : {at::kBFloat16, at::kHalf, at::kFloat, at::kDouble})
    if (name == c10::toString(dtype)) return dtype;
  throw std::logic_error("no dtype of a gradient: " + name);
}

/// A note on one parameter.
RecordedCall note_of(const char* operation, size_t group, size_t param, const std::string& subject = {}) {
  return {.operation = operation, .subject = subject, .group = {}, .bytes = static_cast<int64_t>(group),
          .tensors = static_cast<int>(param)};
}

/// Where this is a parameter of, that is still there.
template <class Visit>
void for_each_place(const Groups& groups, const at::Tensor& handle, const Visit& visit) {
  for (size_t g = 0; g < groups.size(); ++g)
    for (size_t p = 0; p < groups[g].params.size(); ++p)
      if (groups[g].params[p].tensor.is_same(handle) && !groups[g].params[p].is_gone) visit(g, p);
}

StepStatistics& operator+=(StepStatistics& sum, const StepStatistics& more) {
  sum.all_gathers += more.all_gathers;
  sum.gathered_bytes += more.gathered_bytes;
  sum.reductions += more.reductions;
  sum.reduced_bytes += more.reduced_bytes;
  sum.communicated_bytes += more.communicated_bytes;
  sum.buffer_bytes += more.buffer_bytes;
  sum.offloaded_bytes += more.offloaded_bytes;
  return sum;
}

StepStatistics statistics_of_roots(const torch::nn::Module& module) {
  StepStatistics sum;
  for (const auto& root : roots(module)) sum += statistics(root);
  return sum;
}

/// Writes between the collectives of the log when gradients arrive, when a reduction takes them, and when a
/// group gathers: one that shards with nobody has no collective for it.
void log_gradients(const Groups& groups, CallLog& log, std::function<void(std::string_view)> on_range) {
  for (size_t g = 0; g < groups.size(); ++g)
    for (size_t p = 0; p < groups[g].params.size(); ++p) {
      const auto& handle = groups[g].params[p].tensor;
      if (!handle.requires_grad() || groups[g].params[p].is_gone) continue;
      handle.register_hook([&log, g, p](const at::Tensor&) { log.calls.push_back(note_of(kGradient, g, p)); });
    }
  listen_to_ranges([&log, on_range = std::move(on_range)](std::string_view name) {
    on_range(name);
    using Begins = std::pair<std::string_view, const char*>;
    for (const auto& [range, operation] :
         {Begins{"FSDP::post_backward_reduce (", kReduction}, Begins{"FSDP::all_gather (", kGather}}) {
      if (!name.starts_with(range)) continue;
      const auto subject = name.substr(range.size(), name.size() - range.size() - 1);
      log.calls.push_back({.operation = operation, .subject = std::string(subject), .group = {}});
    }
  });
}

/// One reduction of a group in one dtype, and which of its gradients or sums go into it.
struct Reduction {
  size_t group;
  std::set<int> params;
  Moved moved;
  int64_t all_reduced;  ///< bytes of the all-reduce that follows
};

/// Reads the log and adds up what the formula says.
class Replay {
 public:
  Replay(const Rank& rank, const Groups& groups, const Training& training)
      : rank_(rank), groups_(groups), training_(training), waiting_(groups.size()), sums_(groups.size()),
        trainable_(groups.size()), dtypes_(groups.size()) {
    for (size_t g = 0; g < groups.size(); ++g)
      for (size_t p = 0; p < groups[g].params.size(); ++p)
        if (groups[g].params[p].is_trainable && !groups[g].params[p].is_gone) trainable_[g].insert(static_cast<int>(p));
  }

  StepStatistics run(std::span<const RecordedCall> calls) {
    for (size_t i = 0; i < calls.size(); ++i) {
      const auto& call = calls[i];
      const auto launches = [&](const RecordedCall& next) {
        return next.operation == "all_gather" && next.subject == call.subject;
      };
      if (call.operation == kMicroBatch) is_last_ = call.bytes + 1 == training_.micro_batches;
      if (call.operation == kGradient) {
        last_ = static_cast<size_t>(call.bytes);
        waiting_[last_].insert(call.tensors);
      }
      if (call.operation == kThawed) trainable_[static_cast<size_t>(call.bytes)].insert(call.tensors);
      if (call.operation == kReducedIn) dtypes_of(call).reduced_in = dtype_named(call.subject);
      if (call.operation == kKeptIn) dtypes_of(call).kept_in = dtype_named(call.subject);
      if (call.operation == kFrozen) trainable_[static_cast<size_t>(call.bytes)].erase(call.tensors);
      if (call.operation == kReduction) note_reduction(call);
      if (call.operation == kGather && (i + 1 == calls.size() || !launches(calls[i + 1]))) note_gather_alone(call);
      if (call.operation == "all_gather") note_gather(call);
      if (call.operation == "reduce_scatter") note_launch(call);
      if (call.operation == "all_reduce") note_all_reduce(call);
    }
    check_all_have_come();
    return sum_;
  }

  /// What may come on top of the sums: where several groups could have gathered, those count the least.
  const StepStatistics& slack() const { return slack_; }
  /// Of the tensors that LibTorch makes of a number to divide by, beside the runtime's buffers.
  int64_t number_bytes() const { return number_bytes_; }

 private:
  /// By index, of the call's subject. Several roots may have groups of one name.
  std::vector<size_t> candidates(const RecordedCall& call) const {
    std::vector<size_t> found;
    for (size_t g = 0; g < groups_.size(); ++g)
      if (subject_of(groups_[g]) == call.subject) found.push_back(g);
    return found;
  }

  void check_moved(const RecordedCall& call, const std::vector<int64_t>& expected) const {
    rank_.check(std::ranges::find(expected, call.bytes) != expected.end(),
                fmt::format("{} of '{}' moved {} bytes, the formula says {}", call.operation, call.subject, call.bytes,
                            expected.empty() ? "none" : fmt::format("{}", fmt::join(expected, " or "))));
  }

  /// It is launched while its group begins to reduce, or waits for another group; once. Several groups may have such a name.
  void note_launch(const RecordedCall& call) {
    std::vector<int64_t> launched;
    for (const size_t g : candidates(call))
      for (const auto& begun : begun_[g]) launched.push_back(begun.moved.launched);
    check_moved(call, launched);
    for (const size_t g : candidates(call)) {
      const auto found = std::ranges::find(begun_[g], call.bytes, [](const Reduction& one) { return one.moved.launched; });
      if (found == begun_[g].end()) continue;
      begun_[g].erase(found);
      return;
    }
  }

  /// What a gather of the group adds; nothing if the group does not gather over these ranks.
  std::optional<StepStatistics> gathering(const PlainGroup& group, const RecordedCall& call) const {
    const bool is_whole = call.operation == kGather || call.group == group.gathered_over;
    const int64_t ranks = is_whole ? group.ranks : group.ranks_after_forward;
    if (ranks == 0) return std::nullopt;
    const int64_t padded = gathered_by(group).padded;
    return StepStatistics{.gathered_bytes = padded,
                          .communicated_bytes = padded / ranks * (ranks - 1),
                          // What is kept after forward stays on the device.
                          .offloaded_bytes = group.is_offloaded && is_whole ? stored_by(group) / group.ranks : 0};
  }

  void note_gather(const RecordedCall& call) {
    // Groups of several roots may have one name and launch as many bytes; what they add need not be the same.
    std::vector<StepStatistics> possible;
    std::vector<int64_t> expected;
    for (const size_t g : candidates(call)) {
      expected.push_back(gathered_by(groups_[g]).launched);
      if (expected.back() != call.bytes) continue;
      if (const auto one = gathering(groups_[g], call)) possible.push_back(*one);
    }
    check_moved(call, expected);
    rank_.check(!possible.empty(), "a gather over other ranks was asked for");
    add_one_of(possible);
  }

  /// A gather that launches nothing: a rank that shards with nobody, and casts or copies, gathers alone, and a
  /// group of tensor-parallel slices may have no elements. Both count.
  void note_gather_alone(const RecordedCall& call) {
    std::vector<StepStatistics> possible;
    for (const size_t g : candidates(call))
      if (!groups_[g].params.empty() && (groups_[g].ranks == 1 || gathered_by(groups_[g]).launched == 0))
        if (const auto one = gathering(groups_[g], call)) possible.push_back(*one);
    add_one_of(possible);
  }

  void add_one_of(const std::vector<StepStatistics>& possible) {
    if (possible.empty()) return;
    ++sum_.all_gathers;
    for (const auto field : {&StepStatistics::gathered_bytes, &StepStatistics::communicated_bytes,
                             &StepStatistics::offloaded_bytes}) {
      const auto [least, most] = std::ranges::minmax(possible, {}, field);
      sum_.*field += least.*field;
      slack_.*field += most.*field - least.*field;
    }
  }

  /// The gradients that arrive on this rank's sharded parameters.
  void note_assigned(const Reduction& reduction) {
    const auto& group = groups_[reduction.group];
    for (const int p : reduction.params) {
      if (group.is_offloaded)
        sum_.offloaded_bytes += to_local(sharded(group.params[static_cast<size_t>(p)].tensor)).numel() *
                                static_cast<int64_t>(c10::elementSize(dtypes_of(reduction.group, p).kept_in));
    }
  }

  /// The group that takes its gradients now: the one that has some, the last one that got any first. Of several
  /// with one name, all but one are of roots that every backward reaches whole (the model's `out`): those reduce as
  /// their last gradient arrives.
  std::optional<size_t> reducing(const RecordedCall& call) const {
    std::optional<size_t> found;
    const auto known = candidates(call);
    for (const size_t g : known) {
      const bool owes = training_.reduce_unused || !waiting_[g].empty();
      if (owes && (!found || g == last_)) found = g;
    }
    // Sums alone are reduced at the end of the last micro-batch, of what that has not used. Of several groups with
    // one name all come, in whichever order.
    if (!found && is_last_)
      for (const size_t g : known)
        if (!sums_[g].empty()) return g;
    return found;
  }

  /// What is there to be taken. Sums that wait for an all-reduce take part again.
  std::set<int> take(size_t g) {
    auto params = std::exchange(waiting_[g], {});
    params.merge(sums_[g]);
    sums_[g].clear();
    if (training_.reduce_unused) params.insert(trainable_[g].begin(), trainable_[g].end());
    return params;
  }

  void note_reduction(const RecordedCall& call) {
    const auto g = reducing(call);
    if (!g) return;  // nothing is left to take; if something moves after all, the formula says none
    const auto& group = groups_[*g];
    // What float16 holds is divided before it is added up: by a double, which is cast.
    for (const int p : waiting_[*g])
      if (dtypes_of(*g, p).reduced_in == at::kHalf && group.ranks * group.replicas > 1)
        number_bytes_ += static_cast<int64_t>(sizeof(double)) + 2;
    const auto params = take(*g);
    if (group.replicas > 1 && training_.accumulation == Accumulation::kAllReduceLast && !is_last_) sums_[*g] = params;
    begun_[*g].clear();
    for (const auto& [dtype, together] : by_dtype(*g, params)) begin(*g, dtype, together);
  }

  /// What goes in one collective.
  std::map<at::ScalarType, std::set<int>> by_dtype(size_t g, const std::set<int>& params) {
    std::map<at::ScalarType, std::set<int>> parts;
    for (const int p : params) parts[dtypes_of(g, p).reduced_in].insert(p);
    return parts;
  }

  void begin(size_t g, at::ScalarType dtype, const std::set<int>& params) {
    const auto& group = groups_[g];
    const auto moved = reduced_by(group, [&](size_t p) { return params.count(static_cast<int>(p)) > 0; }, dtype);
    const Reduction begun{.group = g, .params = params, .moved = moved, .all_reduced = moved.padded / group.ranks};
    begun_[g].push_back(begun);
    if (group.replicas == 1)
      note_assigned(begun);
    else if (sums_[g].empty())
      under_way_.push_back(begun);
    if (group.ranks * group.replicas == 1) return;
    ++sum_.reductions;
    sum_.reduced_bytes += moved.padded;
    sum_.communicated_bytes += moved.padded / group.ranks * (group.ranks - 1);
  }

  GradientDtypes& dtypes_of(size_t g, int p) {
    return dtypes_[g].try_emplace(p, training_.gradient_dtypes()).first->second;
  }
  GradientDtypes& dtypes_of(const RecordedCall& call) {
    return dtypes_of(static_cast<size_t>(call.bytes), call.tensors);
  }

  /// Which of several groups with one name it is of cannot be told where they move as many bytes, and need not be:
  /// the others' come, too, and together they add the same.
  void note_all_reduce(const RecordedCall& call) {
    if (candidates(call).empty()) return;  // a norm's, say
    std::vector<int64_t> expected;
    const auto found = std::ranges::find_if(under_way_, [&](const Reduction& reduction) {
      if (subject_of(groups_[reduction.group]) != call.subject) return false;
      expected.push_back(reduction.all_reduced);
      return reduction.all_reduced == call.bytes;
    });
    check_moved(call, expected);
    if (found == under_way_.end()) return;
    const int64_t replicas = groups_[found->group].replicas;
    sum_.communicated_bytes += 2 * (replicas - 1) * call.bytes / replicas;
    note_assigned(*found);
    under_way_.erase(found);
  }

  void check_all_have_come() const {
    for (const auto& reduction : under_way_)
      rank_.check(false, fmt::format("of '{}' {} bytes were reduced, and no all_reduce followed",
                                     subject_of(groups_[reduction.group]), reduction.all_reduced));
  }

  const Rank& rank_;
  const Groups& groups_;
  const Training& training_;
  // By group: gradients since its last reduction, and the sums of micro-batches without all-reduce.
  std::vector<std::set<int>> waiting_, sums_;
  std::vector<std::set<int>> trainable_;  // as of now, by group
  size_t last_ = 0;                   // group that got a gradient
  bool is_last_ = true;               // micro-batch
  std::vector<std::map<int, GradientDtypes>> dtypes_;    // as of now, by group; absent: as the policy says
  std::map<size_t, std::vector<Reduction>> begun_;       // of the last reduction of each group, not launched yet
  std::vector<Reduction> under_way_;  // whose all-reduce is to come, oldest first
  StepStatistics sum_, slack_;
  int64_t number_bytes_ = 0;
};

/// What was counted, and between what and what it has to lie.
struct Counted {
  StepStatistics found, expected, slack;
  void check(const Rank& rank, int64_t StepStatistics::*field, const std::string& what) const {
    if (slack.*field == 0) return rank.check_equal(found.*field, expected.*field, what);
    rank.check(found.*field >= expected.*field && found.*field <= expected.*field + slack.*field,
               fmt::format("{}: expected {} to {}, found {}", what, expected.*field, expected.*field + slack.*field,
                           found.*field));
  }
};

void check_sums(const Rank& rank, const Counted& counted) {
  counted.check(rank, &StepStatistics::offloaded_bytes, "offloaded bytes");
  counted.check(rank, &StepStatistics::all_gathers, "all-gathers");
  counted.check(rank, &StepStatistics::gathered_bytes, "gathered bytes");
  counted.check(rank, &StepStatistics::communicated_bytes, "communicated bytes");
  counted.check(rank, &StepStatistics::reductions, "reductions");
  counted.check(rank, &StepStatistics::reduced_bytes, "reduced bytes");
}

}  // namespace

std::string subject_of(const PlainGroup& group) {
  const auto& name = group.module->name();
  return (name.empty() ? "root" : name) + group.suffix;
}

void note_micro_batch(CallLog& log, int index) {
  log.calls.push_back({.operation = kMicroBatch, .subject = {}, .group = {}, .bytes = index});
}

std::shared_ptr<void> own_collectives(CallLog& log, std::shared_ptr<const Groups> groups) {
  return {nullptr, [&log, groups = std::move(groups), first = static_cast<int64_t>(log.calls.size())](void*) {
            static const std::set<std::string> kCollectives{"all_gather", "reduce_scatter", "all_reduce", "broadcast"};
            const auto is_own = [&](const RecordedCall& call) {
              return kCollectives.count(call.operation) > 0 &&
                     std::ranges::none_of(*groups, [&](const auto& group) { return subject_of(group) == call.subject; });
            };
            log.calls.erase(std::remove_if(log.calls.begin() + first, log.calls.end(), is_own), log.calls.end());
          }};
}

void note_trainable(CallLog& log, const Groups& groups, const at::Tensor& handle, bool is_trainable) {
  for_each_place(groups, handle, [&](size_t g, size_t p) {
    log.calls.push_back(note_of(is_trainable ? kThawed : kFrozen, g, p));
  });
}

void note_gradient_dtypes(CallLog& log, const Groups& groups, const at::Tensor& handle, const GradientDtypes& dtypes) {
  for_each_place(groups, handle, [&](size_t g, size_t p) {
    log.calls.push_back(note_of(kReducedIn, g, p, c10::toString(dtypes.reduced_in)));
    log.calls.push_back(note_of(kKeptIn, g, p, c10::toString(dtypes.kept_in)));
  });
}

std::function<void()> watch_run(Rank& rank, const std::shared_ptr<torch::nn::Module>& module,
                                std::shared_ptr<const Groups> groups, const Training& training,
                                std::function<void(std::string_view)> on_range) {
  watch_runtime_allocations();
  log_gradients(*groups, rank.log(), std::move(on_range));
  const size_t first = rank.log().calls.size();
  const auto before = statistics_of_roots(*module);
  const int64_t allocated = runtime_allocated_bytes();
  return [&rank, &training, module, groups, first, before, allocated] {
    listen_to_ranges({});
    const auto all = statistics_of_roots(*module);
    const auto calls = std::span<const RecordedCall>(rank.log().calls).subspan(first);
    auto expected = before;
    Replay replay(rank, *groups, training);
    expected += replay.run(calls);
    check_sums(rank, {.found = all, .expected = expected, .slack = replay.slack()});
    if (const char* sanitizes = std::getenv("FSDP_SANITIZE"); sanitizes == nullptr || *sanitizes == '\0')
      rank.check_equal(runtime_allocated_bytes() - allocated,
                       all.buffer_bytes - before.buffer_bytes + replay.number_bytes(),
                       "bytes that the runtime allocated");
  };
}

}  // namespace fsdp::test
