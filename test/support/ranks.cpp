#include "support/ranks.hpp"

#include <catch2/catch.hpp>

#include <mutex>

#include "support/collective_record.hpp"
#include "support/device_ranks.hpp"
#include "support/skip.hpp"

namespace fsdp::test {

std::string message_of(const std::exception& error) {
  auto* libtorch = dynamic_cast<const c10::Error*>(&error);
  return libtorch ? libtorch->what_without_backtrace() : error.what();
}

class Findings {
 public:
  explicit Findings(int world_size) : checks_(world_size) {}

  void checked(int rank) {
    std::lock_guard lock(mutex_);
    ++checks_[rank];
  }
  void wrong(const std::string& what) {
    std::lock_guard lock(mutex_);
    if (wrong_.size() < kMost) wrong_.push_back(what);
  }
  const std::vector<std::string>& all() const { return wrong_; }
  const std::vector<int64_t>& checks() const { return checks_; }

 private:
  static constexpr size_t kMost = 12;  // one cause is often seen by every rank and tensor
  std::mutex mutex_;
  std::vector<std::string> wrong_;
  std::vector<int64_t> checks_;
};

Rank::Rank(std::shared_ptr<Communicator> world, std::shared_ptr<Findings> findings)
    : findings_(std::move(findings)), log_(std::make_shared<CallLog>()) {
  world_ = recording(std::move(world), log_);
  mesh_ = init_device_mesh(world_, {world_->size()}, {"shard"});
  log_->clear();
}

DeviceMesh Rank::hybrid(int64_t replicate, int64_t shard) const {
  return init_device_mesh(world_, {replicate, shard}, {"replicate", "shard"});
}

void Rank::check(bool condition, const std::string& what) const {
  findings_->checked(index());
  if (!condition) findings_->wrong(fmt::format("rank {}: {}", index(), what));
}

void Rank::check_close(const at::Tensor& given, const at::Tensor& wanted, const std::string& what,
                       double relative) const {
  const auto actual = to_local(given), expected = to_local(wanted);
  if (!actual.defined() || !expected.defined()) {
    check(actual.defined() == expected.defined(),
          fmt::format("{}: expected {}, found {}", what, expected.defined() ? "a tensor" : "none",
                      actual.defined() ? "a tensor" : "none"));
    return;
  }
  if (actual.sizes() != expected.sizes()) {
    check(false, fmt::format("{}: expected sizes {}, found {}", what, expected.sizes().vec(), actual.sizes().vec()));
    return;
  }
  at::NoGradGuard no_grad;
  if (expected.numel() == 0) return check(true, what);
  auto a = actual.to(at::kDouble), e = expected.to(at::kDouble);
  double error = (a - e).abs().max().item<double>();
  double scale = e.abs().max().item<double>();
  // The floor is for what is zero in exact arithmetic, such as a bias in front of a batch norm.
  double allowed = relative * scale + 0.02 * relative;
  check(error <= allowed, fmt::format("{}: differs by {:.3g} where {:.3g} is allowed", what, error, allowed));
}

void Rank::check_identical(const at::Tensor& given, const at::Tensor& wanted, const std::string& what) const {
  const auto actual = to_local(given), expected = to_local(wanted);
  check(actual.defined() == expected.defined() && (!actual.defined() || at::equal(actual, expected)),
        what + ": not identical bit for bit");
}

std::vector<std::string> Rank::calls() const {
  std::vector<std::string> names;
  for (auto& call : log_->calls)
    names.push_back(call.operation + " " + (call.subject.empty() ? "root" : call.subject));
  return names;
}

std::vector<std::string> Rank::subjects_of(const std::string& operation) const {
  std::vector<std::string> subjects;
  for (auto& call : log_->calls)
    if (call.operation == operation) subjects.push_back(call.subject.empty() ? "root" : call.subject);
  return subjects;
}

namespace {

/// `body` on this process's rank of a world of processes. True too where there are not as many, which is said.
bool on_this_process(int world_size, const std::function<void(Rank&)>& body) {
  if (world_size != 1 && world_size != *rank_processes()) {
    skip(fmt::format("{} ranks, where {} processes are the ranks", world_size, *rank_processes()));
    return true;
  }
  const auto findings = std::make_shared<Findings>(world_size);
  const auto world = fresh_process_group(world_size);
  try {
    Rank rank(world, findings);
    body(rank);
  } catch (const std::exception& error) {
    findings->wrong(fmt::format("rank {} ended with: {}", world->rank(), message_of(error)));
    world->abort("a test has failed: " + message_of(error));  // so that the others end instead of waiting
  }
  INFO(fmt::format("rank {} of {}:\n{}", world->rank(), world_size, fmt::join(findings->all(), "\n")));
  CHECK(findings->all().empty());
  if (findings->all().empty()) CHECK(findings->checks()[world->rank()] > 0);
  return findings->all().empty();
}

}  // namespace

bool on_ranks(int world_size, const std::function<void(Rank&)>& body, const ThreadRanksOptions& options) {
  if (rank_processes()) return on_this_process(world_size, body);
  auto findings = std::make_shared<Findings>(world_size);
  const CollectiveRecord record(world_size);
  auto guarded = [&](std::shared_ptr<Communicator> world) {
    Rank rank(record.recorded(std::move(world)), findings);
    try {
      body(rank);
    } catch (const std::exception& error) {
      findings->wrong(fmt::format("rank {} ended with: {}", rank.index(), message_of(error)));
      throw;  // so that the others end instead of waiting
    }
  };
  try {
    run_ranks(world_size, guarded, options);
  } catch (const std::exception& error) {
    if (findings->all().empty()) findings->wrong("run_ranks: " + message_of(error));
  }
  INFO(fmt::format("{} ranks:\n{}", world_size, fmt::join(findings->all(), "\n")));
  CHECK(findings->all().empty());
  if (findings->all().empty())
    for (auto checks : findings->checks()) CHECK(checks > 0);
  return findings->all().empty();
}

std::unique_lock<std::mutex> lock_default_generator() {
  static std::mutex mutex;
  return std::unique_lock(mutex);
}

}  // namespace fsdp::test
