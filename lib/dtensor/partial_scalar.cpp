#include "dtensor/partial_scalar.hpp"

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <fmt/format.h>

#include <limits>
#include <map>
#include <mutex>
#include <utility>

#include "comm/watch/awaited_collectives.hpp"

namespace fsdp {

using Groups = std::vector<std::shared_ptr<Communicator>>;

at::Tensor Combination::combine(const at::Tensor& all) const {
  at::Tensor result;
  switch (kind) {
    case Kind::kSum: result = at::sum(all, at::IntArrayRef{0}, /*keepdim=*/false, all.scalar_type()); break;
    case Kind::kProd: result = at::prod(all, 0, /*keepdim=*/false, all.scalar_type()); break;
    case Kind::kMax: result = at::amax(all, 0); break;
    case Kind::kMin: result = at::amin(all, 0); break;
    case Kind::kAny: result = at::any(all, 0); break;
    case Kind::kAll: result = at::all(all, 0); break;
    case Kind::kNorm: result = at::linalg_vector_norm(all, p, at::IntArrayRef{0}); break;
  }
  if (divisor != 1) result = result / divisor;
  return result.to(dtype);
}

namespace {

at::Scalar lowest(at::ScalarType dtype) {
  if (dtype == at::kBool) return false;
  if (at::isFloatingType(dtype)) return -std::numeric_limits<double>::infinity();
  return AT_DISPATCH_INTEGRAL_TYPES(dtype, "lowest", [] { return at::Scalar(std::numeric_limits<scalar_t>::lowest()); });
}
at::Scalar highest(at::ScalarType dtype) {
  if (dtype == at::kBool) return true;
  if (at::isFloatingType(dtype)) return std::numeric_limits<double>::infinity();
  return AT_DISPATCH_INTEGRAL_TYPES(dtype, "highest", [] { return at::Scalar(std::numeric_limits<scalar_t>::max()); });
}

}  // namespace

at::Tensor Combination::neutral(c10::IntArrayRef sizes, const at::TensorOptions& options) const {
  const auto of = c10::typeMetaToScalarType(options.dtype());
  switch (kind) {
    case Kind::kProd:
    case Kind::kAll: return at::ones(sizes, options);
    case Kind::kMax: return at::full(sizes, lowest(of), options);
    case Kind::kMin: return at::full(sizes, highest(of), options);
    case Kind::kNorm:
      if (p == -std::numeric_limits<double>::infinity()) return at::full(sizes, highest(of), options);
      [[fallthrough]];
    default: return at::zeros(sizes, options);
  }
}

at::Tensor gather_parts(const at::Tensor& part, const Groups& groups, std::string_view subject) {
  auto gathered = part.contiguous().unsqueeze(0);
  for (const auto& group : groups) {
    auto sizes = gathered.sizes().vec();
    sizes.insert(sizes.begin(), group->size());
    const auto all = at::empty(sizes, gathered.options());
    awaited::all_gather(*group, all.view(-1), gathered.view(-1), subject);
    gathered = all.flatten(0, 1);
  }
  return gathered;
}

/// Holds the scalars over one list of groups that wait, in the order in which they were made. It is there while any waits.
class PartialScalar::Queue {
 public:
  explicit Queue(Groups groups) : groups_(std::move(groups)) {}

  static std::shared_ptr<Queue> over(const Groups& groups) {
    std::lock_guard lock(mutex());
    auto& queue = queues()[groups];
    if (!queue) queue = std::make_shared<Queue>(groups);
    return queue;
  }

  // Of one rank, like its communicators: one thread at a time.
  void add(Ptr scalar) {
    waiting_.push_back(std::move(scalar));
    if (waiting_.size() >= kMost) reduce();
  }
  /// Combines all that wait. Where a collective fails they go on waiting, and it fails for the next reader, too.
  void reduce() {
    const c10::InferenceMode no_inference(false);
    const at::NoGradGuard no_grad;
    take(runs());
    for (const auto& scalar : waiting_) scalar->queue_ = nullptr;
    waiting_.clear();
    std::lock_guard lock(mutex());
    queues().erase(groups_);
  }

 private:
  static constexpr size_t kMost = 4096;

  /// Neighbours that are combined alike.
  struct ScalarRun {
    size_t begin, end;
    at::Tensor parts;  // [n]
  };
  static bool is_alike(const PartialScalar& one, const PartialScalar& other) {
    return one.combination_ == other.combination_ && one.part_.scalar_type() == other.part_.scalar_type() &&
           one.part_.device() == other.part_.device();
  }
  std::vector<ScalarRun> runs() const {
    std::vector<ScalarRun> runs;
    for (size_t i = 0; i < waiting_.size();) {
      std::vector<at::Tensor> parts;
      size_t end = i;
      while (end < waiting_.size() && is_alike(*waiting_[end], *waiting_[i])) parts.push_back(waiting_[end++]->part_);
      runs.push_back({i, end, at::stack(parts)});
      i = end;
    }
    return runs;
  }

  /// One collective for all: everything travels as bytes.
  void take(const std::vector<ScalarRun>& runs) {
    std::vector<at::Tensor> bytes;
    for (const auto& run : runs) bytes.push_back(run.parts.view(at::kByte).to(runs[0].parts.device()));
    const auto& first = waiting_[0]->subject_;
    const auto subject = waiting_.size() == 1 ? first : fmt::format("{} and {} more", first, waiting_.size() - 1);
    const auto gathered = gather_parts(bytes.size() == 1 ? bytes[0] : at::cat(bytes), groups_, subject);
    int64_t position = 0;
    for (const auto& run : runs) {
      const auto length = static_cast<int64_t>(run.parts.nbytes());
      // A copy, so that it begins where its dtype may.
      const auto of_ranks = gathered.narrow(1, position, length).clone(at::MemoryFormat::Contiguous);
      const auto values = waiting_[run.begin]->combination_.combine(
          of_ranks.view(run.parts.scalar_type()).to(run.parts.device()));
      for (size_t i = run.begin; i < run.end; ++i)
        waiting_[i]->value_ = values[static_cast<int64_t>(i - run.begin)].clone();
      position += length;
    }
  }

  static std::mutex& mutex() {
    static std::mutex mutex;
    return mutex;
  }
  /// Returns all queues, which are never destroyed: when the program ends, communicators may be gone before them.
  static std::map<Groups, std::shared_ptr<Queue>>& queues() {
    static auto& queues = *new std::map<Groups, std::shared_ptr<Queue>>;
    return queues;
  }

  Groups groups_;
  std::vector<Ptr> waiting_;
};

PartialScalar::Ptr PartialScalar::wait(at::Tensor part, Combination combination, Groups groups, std::string subject) {
  auto scalar = std::make_shared<PartialScalar>(std::move(part), combination, std::move(subject));
  scalar->queue_ = Queue::over(groups);
  const auto queue = scalar->queue_;
  queue->add(scalar);
  return scalar;
}

const at::Tensor& PartialScalar::read() {
  if (!value_.defined()) {
    const auto queue = queue_;  // which lets go of it
    queue->reduce();
  }
  return value_;
}

}  // namespace fsdp
