#include "api/params/full_parameter_scope.hpp"

#include <ATen/ATen.h>

#include <unordered_set>

#include "api/params/own_rows.hpp"
#include "api/state_dict/first_rank.hpp"
#include "base/log.hpp"
#include "base/require.hpp"
#include "group/unsharded_values.hpp"
#include "module/handles.hpp"
#include "module/module_access.hpp"
#include "module/state/module_table.hpp"
#include "root/group_port.hpp"
#include "tensor/broadcast_whole.hpp"

namespace fsdp {

namespace {

constexpr auto kCaller = "FullParameters";

bool is_shown(const FoundParam& found) {
  const auto* storage = found.param().unsharded.storage();
  return storage != nullptr && storage->is_set_aside();
}

/// The unsharded parameters below the module's roots that are shown already: in the tables they look like any tensor.
std::unordered_set<const c10::TensorImpl*> shown_unsharded(const torch::nn::Module& module) {
  std::unordered_set<const c10::TensorImpl*> unsharded_params;
  for (const auto& root : roots(module)) {
    auto& context = *handles::state(root).root()->context();
    if (!context.step().is_pinned()) continue;
    for (auto* group : context.runner().groups())
      for (const auto& param : group->params())
        if (param.unsharded.storage() != nullptr && param.unsharded.storage()->is_set_aside())
          unsharded_params.insert(param.unsharded_param().unsafeGetTensorImpl());
  }
  return unsharded_params;
}

/// Row-major, so that tensors of one shape compare bit for bit: zeros of two signs, NaNs.
at::Tensor as_bytes(const at::Tensor& tensor) {
  return tensor.clone(at::MemoryFormat::Contiguous).view({-1}).view(at::kByte);
}

}  // namespace

FullParameterScope::FullParameterScope(torch::nn::Module& module, ShowWhich which,
                                 const FullParametersOptions& options)
    : options_(options) {
  require(!options.rank0_only || !options.writeback,
          "{}: rank0_only with writeback would leave the ranks with different values; set writeback "
          "to false",
          kCaller);
  for (const auto& root : roots(module))
    if (auto& context = *handles::state(root).root()->context(); !context.step().is_pinned()) bring_home(context);
  collect(module, which, /*is_start=*/true);
  const auto already = shown_unsharded(module);
  for (const auto& param : module.parameters(/*recurse=*/which != ShowWhich::kOwn))
    require_state(!already.contains(param.unsafeGetTensorImpl()),
                  "{}: a parameter of sizes {} is shown by another scope already; end that first",
                  kCaller, fmt::join(param.sizes(), "x"));
  hold_roots();
  if (options_.with_grads) check_gradients();
  const auto mesh = leading_mesh(
      module, shown_.empty() ? std::nullopt : std::optional(shown_.front().found));
  const bool keeps = !options_.rank0_only || is_first_rank(mesh);
  gather(keeps);
  if (!keeps) {
    shown_.clear();
    return;
  }
  try {
    for (auto& shown : shown_) show(shown, options_.with_grads);
  } catch (...) {
    for (auto& shown : shown_)
      if (shown.storage) restore(shown);
    throw;
  }
}

FullParameterScope::~FullParameterScope() {
  for (auto& shown : shown_) {
    if (!shown.storage) continue;
    try {
      if (options_.writeback) write_back(shown);
    } catch (const std::exception& error) {
      log().error("{}: what was written to the full parameter is lost: {}",
                  shown.found.param().name(), error.what());
    }
    try {
      restore(shown);
    } catch (const std::exception& error) {
      log().error("{}: the end of {} failed: {}", shown.found.param().name(), kCaller, error.what());
    }
  }
}

void FullParameterScope::collect(torch::nn::Module& module, ShowWhich which, bool is_start) {
  if (!is_start && which == ShowWhich::kUnit && find_state(module)) return;
  auto& table = ModuleAccess::parameters(module);
  for (size_t slot = 0; slot < table.size(); ++slot) {
    const auto& entry = table[slot].value();
    if (auto found = find_param(entry); found && !found->is_unsharded_param)
      add(std::move(*found), {&module, module.weak_from_this().lock(), slot});
  }
  if (which == ShowWhich::kOwn) return;
  for (const auto& child : module.named_children())
    if (child.value()) collect(*child.value(), which, /*is_start=*/false);
}

void FullParameterScope::add(FoundParam found, TableEntry entry) {
  const auto known = std::find_if(shown_.begin(), shown_.end(), [&](const FullParam& shown) {
    return shown.found.group == found.group && shown.found.index == found.index;
  });
  if (known != shown_.end()) {
    known->entries.push_back(std::move(entry));
    return;
  }
  auto& shown = shown_.emplace_back();
  shown.found = std::move(found);
  shown.entries.push_back(std::move(entry));
  shown.local_tensor = shown.found.param().local_tensor();
  shown.sharded_param = shown.found.param().sharded_param();
  shown.unsharded_param = shown.found.param().unsharded_param();
}

void FullParameterScope::hold_roots() {
  for (const auto& shown : shown_) {
    const auto& param = shown.found.param();
    require_state(!shown.found.group->parts().config.device.is_meta(),
                  "{}: {} is on the meta device and has no values; materialise the module first",
                  kCaller, param.name());
    require_state(!is_shown(shown.found), "{}: {} is shown by another scope already; end that first",
                  kCaller, param.name());
    const auto& context = GroupPort::of(*shown.found.group).root();
    if (!held_roots_.contains(context)) held_roots_.emplace(context, context->hold_steps(kCaller));
  }
}

void FullParameterScope::check_gradients() const {
  std::vector<ParamFact> facts;
  for (const auto& shown : shown_)
    facts.push_back({shown.found, shown.local_tensor.grad().defined() ? "1" : "0"});
  require_same_facts(facts, "FullParameters",
                     "with_grads needs gradients for the same parameters on all "
                     "ranks, but the ranks differ; see set_reduce_scatter_unused_params");
}

void FullParameterScope::gather(bool keeps) {
  const auto settle = [&](at::Tensor whole) {
    if (!keeps) return at::Tensor();
    return options_.offload_to_cpu ? whole.cpu() : whole;
  };
  for (auto& shown : shown_) {
    const auto& group = *shown.found.group;
    const auto gathered = [&](const at::Tensor& local) { return settle(unsharded_values(group, shown.found.index, local)); };
    shown.whole = gathered(shown.local_tensor);
    if (const auto gradient = shown.local_tensor.grad(); options_.with_grads && gradient.defined())
      shown.whole_gradient = gathered(gradient);
  }
}

void FullParameterScope::show(FullParam& shown, bool with_gradient) {
  shown.version = static_cast<int64_t>(shown.local_tensor._version());
  shown.unreduced_gradient = accumulated_grad(shown.unsharded_param);
  shown.storage = shown.found.param().unsharded.set_aside(shown.whole);
  shown.whole.reset();
  if (const auto& shared = shown.found.param().sharded.shared()) shared->set_aside(true);
  accumulated_grad(shown.unsharded_param) = with_gradient ? std::move(shown.whole_gradient) : at::Tensor();
  for (const auto& entry : shown.entries)
    ModuleAccess::parameters(*entry.module)[entry.slot].value() = shown.unsharded_param;
}

void FullParameterScope::write_back(FullParam& shown) const {
  const auto& param = shown.found.param();
  at::NoGradGuard no_grad;
  require(shown.unsharded_param.sizes() == c10::IntArrayRef(param.spec.sizes()), "its sizes became {}, expected {}",
          fmt::join(shown.unsharded_param.sizes(), "x"), fmt::join(param.spec.sizes(), "x"));
  if (static_cast<int64_t>(shown.local_tensor._version()) != shown.version)
    log().warn("{}: the sharded parameter was written inside FullParameters; the values of the full parameter replace it",
               param.name());
  const auto local_tensor = plain_view(shown.local_tensor);
  const auto own = own_rows(shown.found, shown.unsharded_param).to(local_tensor.options());
  // A write that changes nothing would have everything gathered again.
  if (!at::equal(as_bytes(own), as_bytes(local_tensor))) local_tensor.copy_(own);
  if (!options_.with_grads) return;
  write_back_gradient(shown);
  if (const auto& classes = shown.found.group->parts().local_shards) classes->refresh(*shown.found.group);
}

void FullParameterScope::write_back_gradient(FullParam& shown) {
  const auto whole = accumulated_grad(shown.unsharded_param);
  auto& gradient = shown.local_tensor.mutable_grad();
  if (!whole.defined()) {
    gradient.reset();
    return;
  }
  const auto own = own_rows(shown.found, whole);
  if (gradient.defined()) {
    gradient.copy_(own);
    return;
  }
  const auto& asked = shown.found.param().grad_dtype();
  const auto dtype = asked.is_set ? asked.dtype.value_or(own.scalar_type()) : shown.local_tensor.scalar_type();
  gradient = own.to(shown.local_tensor.device(), dtype, /*non_blocking=*/false, /*copy=*/true);
}

void FullParameterScope::restore(FullParam& shown) {
  shown.found.param().unsharded.restore(shown.found.param().spec, std::exchange(shown.storage, {}));
  if (const auto& shared = shown.found.param().sharded.shared()) shared->set_aside(false);
  accumulated_grad(shown.unsharded_param) = std::move(shown.unreduced_gradient);
  for (const auto& entry : shown.entries) {
    auto& table = ModuleAccess::parameters(*entry.module);
    if (entry.slot < table.size()) table[entry.slot].value() = shown.sharded_param;
  }
}

}  // namespace fsdp
