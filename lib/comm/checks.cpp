#include "comm/checks.hpp"

#include <c10/core/ScalarType.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "base/plain_values.hpp"
#include "base/require.hpp"

namespace fsdp {
namespace checks {
namespace {

// The conditions are tested here, before `require` is called, so that the good case formats and
// copies nothing: these run for every collective.
[[noreturn]] void reject(const Communicator& comm, const char* operation, std::string_view subject,
                         const std::string& found) {
  throw UsageError(fmt::format("{} of '{}' in group '{}' on rank {} of {}: {}", operation, subject,
                               comm.name(), comm.rank(), comm.size(), found));
}

bool is_groups(const Communicator& comm, c10::Device device) {
  return device.type() == comm.device_type() && (comm.device_index() < 0 || device.index() == comm.device_index());
}

/// "cuda:1", or "cuda" of a group that takes any.
std::string place_of(const Communicator& comm) {
  const std::string type = c10::DeviceTypeName(comm.device_type(), /*lower_case=*/true);
  return comm.device_index() < 0 ? type : fmt::format("{}:{}", type, comm.device_index());
}

void one(const Communicator& comm, const char* operation, const char* role,
         const at::Tensor& tensor, std::string_view subject, Devices devices) {
  if (!tensor.defined()) [[unlikely]]
    reject(comm, operation, subject, fmt::format("the {} is an undefined tensor", role));
  if (!is_plain(tensor)) [[unlikely]]
    reject(comm, operation, subject,
           fmt::format("the {} is {}, whose memory does not hold its values; pass a plain tensor", role, what_it_is(tensor)));
  if (!tensor.is_contiguous()) [[unlikely]]
    reject(comm, operation, subject,
           fmt::format("the {} must be contiguous, found sizes [{}] with strides [{}]; pass "
                       "tensor.contiguous()",
                       role, fmt::join(tensor.sizes(), ", "), fmt::join(tensor.strides(), ", ")));
  if (devices == Devices::kGroups && !is_groups(comm, tensor.device())) [[unlikely]]
    reject(comm, operation, subject,
           fmt::format("the {} must be on {}, where this group's {} backend works, found {}", role, place_of(comm),
                       comm.backend(), tensor.device().str()));
}

/// What `pair` asks, in one go: it is asked of every piece of every collective.
class Fine {
 public:
  /// first: on whose device all others have to be, where the group takes any of its type.
  Fine(const Communicator& comm, Devices devices, const at::Tensor& first)
      : ranks_(comm.size()), device_(comm.device_type(), comm.device_index()), is_any_(devices == Devices::kAny) {
    if (!device_.has_index() && is_plain(first) && first.device().type() == device_.type()) device_ = first.device();
  }

  bool operator()(const at::Tensor& whole, const at::Tensor& piece) const {
    const auto *one = whole.unsafeGetTensorImpl(), *other = piece.unsafeGetTensorImpl();
    return is_plain(*one) && is_plain(*other) && one->is_contiguous() && other->is_contiguous() &&
           one->dtype() == other->dtype() && one->numel() == other->numel() * ranks_ &&
           (is_any_ || (one->device() == device_ && other->device() == device_));
  }

 private:
  int64_t ranks_;
  c10::Device device_;
  bool is_any_;
};

/// Throws for tensors that are right but for their device: one of the two is not where `first` is.
[[noreturn]] void reject_places(const Communicator& comm, const char* operation, const at::Tensor& first,
                                const at::Tensor& one, const at::Tensor& other, std::string_view subject) {
  reject(comm, operation, subject,
         fmt::format("all tensors of a collective must be on one device, found {} and {}", first.device().str(),
                     (one.device() == first.device() ? other : one).device().str()));
}

/// `whole` holds one piece of `piece`'s size for each rank.
void pair(const Communicator& comm, const char* operation, const at::Tensor& whole,
          const char* whole_role, const at::Tensor& piece, const char* piece_role,
          std::string_view subject, Devices devices) {
  if (Fine(comm, devices, whole)(whole, piece)) [[likely]]
    return;
  one(comm, operation, whole_role, whole, subject, devices);
  one(comm, operation, piece_role, piece, subject, devices);
  if (whole.scalar_type() != piece.scalar_type()) [[unlikely]]
    reject(
        comm, operation, subject,
        fmt::format("output and input must share one dtype, found {} for the {} and {} for the {}",
                    c10::toString(whole.scalar_type()), whole_role,
                    c10::toString(piece.scalar_type()), piece_role));
  if (whole.numel() != piece.numel() * comm.size()) [[unlikely]]
    reject(comm, operation, subject,
           fmt::format("the {} must have {} ranks x {} elements = {}, found {}", whole_role,
                       comm.size(), piece.numel(), piece.numel() * comm.size(), whole.numel()));
  reject_places(comm, operation, whole, whole, piece, subject);
}

void batch(const Communicator& comm, const char* operation, std::span<const at::Tensor> outputs,
           std::span<const at::Tensor> inputs, std::string_view subject) {
  if (outputs.size() != inputs.size() || outputs.empty()) [[unlikely]]
    reject(comm, operation, subject,
           fmt::format("a batch needs as many outputs as inputs, and one at least; found {} and {}",
                       outputs.size(), inputs.size()));
}

}  // namespace

void all_gather(const Communicator& comm, const at::Tensor& output, const at::Tensor& input,
                std::string_view subject, Devices devices) {
  pair(comm, "all_gather", output, "output", input, "input", subject, devices);
}

void reduce_scatter(const Communicator& comm, const at::Tensor& output, const at::Tensor& input,
                    std::string_view subject, Devices devices) {
  pair(comm, "reduce_scatter", input, "input", output, "output", subject, devices);
}

void all_reduce(const Communicator& comm, const at::Tensor& tensor, std::string_view subject,
                Devices devices) {
  one(comm, "all_reduce", "tensor", tensor, subject, devices);
}

void broadcast(const Communicator& comm, const at::Tensor& tensor, int root,
               std::string_view subject, Devices devices) {
  one(comm, "broadcast", "tensor", tensor, subject, devices);
  if (root < 0 || root >= comm.size()) [[unlikely]]
    reject(comm, "broadcast", subject,
           fmt::format("the root must be a rank of the group, 0 to {}, found {}", comm.size() - 1,
                       root));
}

void all_gather_batch(const Communicator& comm, std::span<const at::Tensor> outputs,
                      std::span<const at::Tensor> inputs, std::string_view subject,
                      Devices devices) {
  batch(comm, "all_gather", outputs, inputs, subject);
  const Fine is_fine(comm, devices, outputs[0]);
  for (size_t i = 0; i < outputs.size(); ++i)
    if (!is_fine(outputs[i], inputs[i])) [[unlikely]] {
      all_gather(comm, outputs[i], inputs[i], subject, devices);
      reject_places(comm, "all_gather", outputs[0], outputs[i], inputs[i], subject);
    }
}

void reduce_scatter_batch(const Communicator& comm, std::span<const at::Tensor> outputs,
                          std::span<const at::Tensor> inputs, std::string_view subject,
                          Devices devices) {
  batch(comm, "reduce_scatter", outputs, inputs, subject);
  const Fine is_fine(comm, devices, inputs[0]);
  for (size_t i = 0; i < outputs.size(); ++i)
    if (!is_fine(inputs[i], outputs[i])) [[unlikely]] {
      reduce_scatter(comm, outputs[i], inputs[i], subject, devices);
      reject_places(comm, "reduce_scatter", inputs[0], outputs[i], inputs[i], subject);
    }
}

}  // namespace checks

namespace {

std::string group_name(const std::string& name, const std::vector<int>& world_ranks) {
  if (name.find('[') != std::string::npos) return name;
  constexpr size_t kSpelledOut = 8;
  if (world_ranks.size() <= kSpelledOut)
    return fmt::format("{}[{}]", name, fmt::join(world_ranks, ","));
  return fmt::format("{}[{},{},..,{}]", name, world_ranks[0], world_ranks[1], world_ranks.back());
}

}  // namespace

SplitPlan plan_split(const Communicator& parent, std::span<const int> ranks,
                     const std::string& name) {
  require(!ranks.empty(), "split of group '{}' into '{}': a group needs at least one rank",
          parent.name(), name);
  SplitPlan plan;
  std::vector<bool> seen(parent.size());
  for (const int rank : ranks) {
    require(rank >= 0 && rank < parent.size(),
            "split of group '{}' into '{}': {} is not a rank of the group; expected 0 to {}",
            parent.name(), name, rank, parent.size() - 1);
    require(!seen[rank], "split of group '{}' into '{}': rank {} is listed twice", parent.name(),
            name, rank);
    seen[rank] = true;
    if (rank == parent.rank()) plan.rank = static_cast<int>(plan.world_ranks.size());
    plan.world_ranks.push_back(parent.ranks()[rank]);
  }
  plan.name = group_name(name, plan.world_ranks);
  return plan;
}

}  // namespace fsdp
