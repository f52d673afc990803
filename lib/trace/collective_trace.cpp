#include "trace/collective_trace.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/environment.hpp"
#include "base/require.hpp"
#include "base/stable_hash.hpp"
#include "comm/notice_board.hpp"
#include "comm/work.hpp"
#include "trace/desync/desync_watch.hpp"
#include "trace/nvtx_ranges.hpp"

namespace fsdp {

namespace {

/// The ranks of the mesh that a group lives on, as ranks of the world that its groups were split from.
/// Every rank of the mesh says the same.
std::vector<int> ranks_of(const MeshInfo& info) {
  const auto& shard = info.shard_group->ranks();
  if (info.replicate_size() == 1) return shard;
  const auto& replicate = info.replicate_group->ranks();
  if (info.shard_size() == 1) return replicate;
  const auto& known = info.mesh.ranks();
  const size_t row = static_cast<size_t>(info.replicate_rank()) * shard.size();
  bool is_of_world = known.size() == shard.size() * replicate.size() &&
                     std::equal(shard.begin(), shard.end(), known.begin() + static_cast<ptrdiff_t>(row));
  for (size_t i = 0; is_of_world && i < replicate.size(); ++i)
    is_of_world = known[i * shard.size() + static_cast<size_t>(info.shard_rank())] == replicate[i];
  if (is_of_world) return known;
  // A mesh over a part of the world numbers that part: the other rows lie as far from this one as
  // their members of this column do.
  std::vector<int> ranks;
  const int own = shard[static_cast<size_t>(info.shard_rank())];
  for (const int above : replicate)
    for (const int beside : shard) ranks.push_back(above + beside - own);
  return ranks;
}

std::string path_of(const std::shared_ptr<Communicator>& group) {
  const auto place = group ? place_of(*group) : nullptr;
  return place ? place->path() : "";
}

uint64_t hash_of(const std::vector<int>& ranks) {
  uint64_t hash = ranks.size();
  for (const int rank : ranks) hash = mixed_hash(hash, static_cast<uint64_t>(rank));
  return hash;
}

WatchTimes times_of(const ScheduleCheckOptions& options, std::chrono::milliseconds timeout) {
  using std::chrono::milliseconds;
  const auto late = options.late_after.value_or(std::min(milliseconds(30'000), timeout / 2));
  return {.late_after = late,
          .compare_after = options.compare_after.value_or(std::min(milliseconds(1'000), late / 4)),
          .timeout = timeout};
}

/// Tells the meter how long it lives.
class WaitClock {
 public:
  explicit WaitClock(StepMeter& meter) : meter_(meter) {}
  ~WaitClock() { meter_.add_wait(std::chrono::nanoseconds(std::chrono::steady_clock::now() - begin_).count()); }
  WaitClock(const WaitClock&) = delete;
  WaitClock& operator=(const WaitClock&) = delete;

 private:
  StepMeter& meter_;
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

}  // namespace

std::string Range::name_of(const char* what, const GroupIdentity& group) { return fmt::format("{} ({})", what, group.name); }

void Range::begin(CollectiveTrace& trace, std::string name) {
  auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
  if (callbacks) {
    profiled_.emplace(std::move(*callbacks));
    profiled_->before(name);
  }
  recorder_ = trace.recorder();
  if (recorder_ != nullptr) recorder_->begin_slice(std::move(name));
}

CollectiveTrace::CollectiveTrace(StepMeter& meter) : meter_(meter) { show_ranges_to_nvtx_where_asked(); }
CollectiveTrace::~CollectiveTrace() = default;

void CollectiveTrace::set_check(const ScheduleCheckOptions& options) {
  require_state(log_ == nullptr,
                "set_schedule_check: the model has communicated already; call it on all ranks before the first step");
  check_ = options;
}

void CollectiveTrace::start_watch(const CollectiveCall& call) {
  log_ = std::make_shared<CollectiveLog>();
  if (!check_.is_enabled || !environment::checks_schedule()) return;
  // Groups of one root may live on different meshes (experts): all ranks of the widest are watched.
  const auto* widest = &call.group.mesh_info;
  auto ranks = ranks_of(*widest);
  for (const auto* group : groups_)
    if (auto others = ranks_of(group->mesh_info); others.size() > ranks.size()) {
      widest = &group->mesh_info;
      ranks = std::move(others);
    }
  auto board = notice_board_of(widest->group_in_world());
  const int own = widest->world_rank();
  if (!board || std::find(ranks.begin(), ranks.end(), own) == ranks.end()) return;
  // Roots over communicators of their own need no order among them: each may have a thread, which comes when it comes.
  const auto name = fmt::format("schedule/{}x{:x}{}|{}", ranks.size(), hash_of(ranks), path_of(widest->shard_group),
                                path_of(widest->replicate_group));
  // Roots over the same ones are told apart by the order of their first collectives: ranks that begin with different
  // roots disagree, and are told so.
  const int number = board->number(fmt::format("{}/{}", name, own));
  compares_every_entry_ = check_.before_every_collective.value_or(environment::debugs_in_detail());
  const auto times = times_of(check_, board->timeout());
  watched_ = ranks;
  // What some of these ranks alone await says nothing about the others.
  auto& group = widest->group_in_world();
  if (group.size() == static_cast<int>(ranks.size())) log_->count_between(place_of(group));
  watch_ = std::make_unique<DesyncWatch>(
      log_, DesyncBoard(std::move(board), fmt::format("{}/{}", name, number), own, std::move(ranks)),
      times);
}

void CollectiveTrace::introduce(const GroupIdentity& group) {
  const auto id = static_cast<size_t>(group.id);
  log_->introduce(group.id, group.name, group.params);
  if (id >= is_apart_.size()) is_apart_.resize(id + 1);
  const auto ranks = ranks_of(group.mesh_info);
  is_apart_[id] = std::any_of(watched_.begin(), watched_.end(), [&](int rank) {
    return std::find(ranks.begin(), ranks.end(), rank) == ranks.end();
  });
}

void CollectiveTrace::note_first_values(std::vector<FirstValuesOfGroup> all) {
  if (all.empty() || !check_.is_enabled || !environment::checks_schedule()) return;
  std::vector<const FirstValues*> values;
  for (const auto& one : all) values.push_back(one.values.get());
  auto hashes = FirstValues::hashes_of(values);
  for (size_t g = 0; g < all.size(); ++g) {
    const auto& group = all[g].group;
    const auto& info = group.mesh_info;
    const auto ranks = ranks_of(info);
    const auto rank_at = [&](int replica, int shard) {
      return ranks[static_cast<size_t>(replica) * static_cast<size_t>(info.shard_size()) + static_cast<size_t>(shard)];
    };
    Beginning beginning{.group = group.name, .params = group.params, .hashes = std::move(hashes[g])};
    // What has been written since, with values of a checkpoint for instance, is not what the rank began with.
    for (size_t i = 0; i < beginning.hashes.size(); ++i)
      if (all[g].versions[i] != values[g]->version(i)) beginning.hashes[i].reset();
    if (info.shard_size() > 1)
      beginning.next_beside = rank_at(info.replicate_rank(), (info.shard_rank() + 1) % info.shard_size());
    if (info.replicate_size() > 1)
      beginning.next_replica = rank_at((info.replicate_rank() + 1) % info.replicate_size(), info.shard_rank());
    beginnings_.push_back(std::move(beginning));
  }
}

void CollectiveTrace::begin(const CollectiveCall& call, InCollective& inside) {
  if (recorder_) [[unlikely]]
    recorder_->begin_collective({.name = names_of(call.operation).plain,
                                 .subject = call.group.name,
                                 .group = call.comm.name(),
                                 .ranks = call.comm.size(),
                                 .bytes = call.bytes});
  if (call.comm.size() == 1) return;
  if (!log_) [[unlikely]]
    start_watch(call);
  if (!log_->knows(call.group.id)) [[unlikely]]
    introduce(call.group);
  if (watch_) {
    (*watch_)->check();
    (*watch_)->add(call.comm);
  }
  inside.enter(channels_.launches(call.operation, call.group, call.comm), call.operation, call.group);
  const bool is_apart = is_apart_[static_cast<size_t>(call.group.id)];
  log_->note({.operation = call.operation,
              .dtype = call.dtype,
              .ranks = call.comm.size(),
              .group = call.group.id,
              .bytes = is_apart ? 0 : call.bytes,
              .params = is_apart ? CollectiveEntry::kAllParams : call.params});
  if (!watch_) return;
  (*watch_)->enter(call.operation, call.group.id);
  if (compares_every_entry_) compare_entry(call);
}

void CollectiveTrace::compare_entry(const CollectiveCall& call) {
  try {
    (*watch_)->compare_last_entry(log_->position());
  } catch (const ScheduleError&) {
    throw;
  } catch (const CommError& error) {
    CollectiveInfo(names_of(call.operation).plain, call.group.name, call.comm, call.bytes).fail(error.what());
  }
}

void CollectiveTrace::leave() noexcept {
  if (watch_) (*watch_)->leave();
}

void CollectiveTrace::wait(Operation operation, const GroupIdentity& group, const std::shared_ptr<Work>& work) {
  if (work) {
    const Range range(*this, names_of(operation).wait_range, group);
    InCollective inside(*this);
    if (watch_) (*watch_)->enter(operation, group.id);
    const WaitClock clock(meter_);
    try {
      if (const auto* channel = channels_.of(operation, group)) inside.enter(*channel, operation, group);
      work->wait();
    } catch (const CommError& error) {
      explain(error);
    }
  }
  if (recorder_) [[unlikely]]
    recorder_->end_collective(names_of(operation).plain, group.name, /*is_given_up=*/false);
}

void CollectiveTrace::note_given_up(Operation operation, const GroupIdentity& group) {
  if (recorder_) recorder_->end_collective(names_of(operation).plain, group.name, /*is_given_up=*/true);
}

void CollectiveTrace::explain(const CommError& error) {
  if (watch_) {
    const auto late = (*watch_)->explain_failure(error.what());
    if (!late.empty()) throw CommError(fmt::format("{}\n{}", error.what(), late), error.failed());
  }
  throw;
}

void CollectiveTrace::begin_phase(Phase phase) {
  if (watch_) (*watch_)->set_in_step(true);
  if (recorder_) recorder_->begin_phase(phase == Phase::kForward ? "forward" : "backward");
}

void CollectiveTrace::end_step() {
  if (recorder_) recorder_->begin_phase("between steps");
  if (!log_) return;
  const bool is_new = log_->end_step();
  if (!watch_) return;
  (*watch_)->set_in_step(false);
  if (is_new) (*watch_)->compare_step(log_->position());
  if (is_new && !beginnings_.empty()) [[unlikely]]
    (*watch_)->compare_beginnings(std::exchange(beginnings_, {}));
}

void CollectiveTrace::abandon_step() {
  if (recorder_) recorder_->begin_phase("between steps");
  if (log_) log_->abandon_step();
  if (watch_) (*watch_)->set_in_step(false);
}

void CollectiveTrace::show_use(const GroupIdentity* group) {
  if (group != nullptr)
    recorder_->begin_use(group->name);
  else
    recorder_->end_use();
}

void CollectiveTrace::start_timeline(int rank, size_t max_events) {
  recorder_ = std::make_unique<TimelineRecorder>(rank, max_events);
  recorder_->begin_phase("between steps");
  meter_.set_recorder(recorder_.get());
  has_listener_ = true;
}

Timeline CollectiveTrace::stop_timeline() {
  require_state(recorder_ != nullptr, "stop_timeline: none was started; call start_timeline first");
  meter_.set_recorder(nullptr);
  auto timeline = recorder_->take();
  recorder_.reset();
  return timeline;
}

}  // namespace fsdp
