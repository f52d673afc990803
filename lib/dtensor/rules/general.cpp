#include <ATen/ATen.h>

#include <mutex>

#include "base/log.hpp"
#include "base/require.hpp"
#include "dtensor/rules/propagate.hpp"

// The general rule: whole operands, the operator itself, and what it has written goes back to the pieces.
namespace fsdp {

namespace {

std::mutex& mutex() {
  static std::mutex mutex;
  return mutex;
}
std::map<std::string, int64_t>& counts() {
  static std::map<std::string, int64_t> counts;
  return counts;
}

void count(const OperatorCall& call) {
  const auto& name = call.op().schema().name();
  bool is_first = false;
  {
    std::lock_guard lock(mutex());
    is_first = ++counts()[name] == 1;
  }
  if (is_first) log().debug("{} has no rule for these sharded operands: they are gathered for it", name);
}

struct Write {
  at::Tensor target;  ///< the DTensor, or the one whose elements it shows
  at::Tensor whole;   ///< that the operator writes to
};

/// What the operator gets in the place of one that it writes to: a view of `write.whole`.
at::Tensor writable(const at::Tensor& tensor, const OperatorCall& call, std::vector<Write>& writes) {
  const auto* dtensor = DTensorImpl::of(tensor);
  const auto target = dtensor->is_window() ? dtensor->base() : tensor;
  const auto* impl = DTensorImpl::of(target);
  const auto known = std::find_if(writes.begin(), writes.end(),
                                  [&](const Write& write) { return DTensorImpl::of(write.target) == impl; });
  at::Tensor whole;
  if (known != writes.end()) {
    whole = known->whole;
  } else {
    whole = impl->value().own_whole(call.name());
    writes.push_back({target, whole});
  }
  return dtensor->is_window() ? whole.as_strided(dtensor->sizes(), dtensor->strides(), dtensor->storage_offset()) : whole;
}

}  // namespace

std::map<std::string, int64_t> general_rule_counts() {
  std::lock_guard lock(mutex());
  return counts();
}

void run_general(const OperatorCall& call) {
  count(call);
  auto arguments = call.arguments();
  std::vector<Write> writes;
  for (size_t i = 0; i < call.count(); ++i)
    replace_tensors(arguments[i], [&](const at::Tensor& tensor, int64_t) {
      const auto* dtensor = DTensorImpl::of(tensor);
      if (dtensor == nullptr) return at::Tensor();
      return call.is_written(i) ? writable(tensor, call, writes) : dtensor->whole(call.name());
    });
  auto results = call.call(arguments);
  for (const auto& write : writes) {
    auto* target = DTensorImpl::of(write.target);
    require(write.whole.sizes() == target->sizes(),
            "{}: would change the sizes of a sharded tensor; take fsdp::full_tensor(tensor) first", call.op().schema().name());
    const at::NoGradGuard no_grad;
    target->local().copy_(part_of(target->spec(), write.whole));
  }
  call.give_results(std::move(results), [](const at::Tensor&, int64_t) { return at::Tensor(); });
}

}  // namespace fsdp
