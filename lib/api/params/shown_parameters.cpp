#include "api/params/shown_parameters.hpp"

#include <ATen/ATen.h>

#include <unordered_set>

#include "api/params/whole_values.hpp"
#include "api/state_dict/first_rank.hpp"
#include "base/log.hpp"
#include "base/require.hpp"
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

ShownParameters::ShownParameters(torch::nn::Module& module, ShowWhich which,
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

ShownParameters::~ShownParameters() {
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

void ShownParameters::collect(torch::nn::Module& module, ShowWhich which, bool is_start) {
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

void ShownParameters::add(FoundParam found, Place place) {
  const auto known = std::find_if(shown_.begin(), shown_.end(), [&](const Shown& shown) {
    return shown.found.group == found.group && shown.found.index == found.index;
  });
  if (known != shown_.end()) {
    known->places.push_back(std::move(place));
    return;
  }
  auto& shown = shown_.emplace_back();
  shown.found = std::move(found);
  shown.places.push_back(std::move(place));
  shown.sharded_param = shown.found.param().sharded_param();
  shown.registered_param = shown.found.param().registered_param();
  shown.unsharded_param = shown.found.param().unsharded_param();
}

void ShownParameters::hold_roots() {
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

void ShownParameters::check_gradients() const {
  std::vector<ParamFact> facts;
  for (const auto& shown : shown_)
    facts.push_back({shown.found, shown.sharded_param.grad().defined() ? "1" : "0"});
  require_same_facts(facts, "FullParameters",
                     "with_grads needs gradients for the same parameters on all "
                     "ranks, but the ranks differ; see set_reduce_scatter_unused_params");
}

void ShownParameters::gather(bool keeps) {
  const auto settle = [&](at::Tensor whole) {
    if (!keeps) return at::Tensor();
    return options_.offload_to_cpu ? whole.cpu() : whole;
  };
  for (auto& shown : shown_) {
    shown.whole = settle(gather_values(*shown.found.group, shown.found.index, shown.sharded_param));
    if (const auto gradient = shown.sharded_param.grad(); options_.with_grads && gradient.defined())
      shown.whole_gradient = settle(gather_values(*shown.found.group, shown.found.index, gradient));
  }
}

void ShownParameters::show(Shown& shown, bool with_gradient) {
  shown.version = static_cast<int64_t>(shown.sharded_param._version());
  shown.unreduced_gradient = accumulated_grad(shown.unsharded_param);
  shown.storage = shown.found.param().unsharded.set_aside(shown.whole);
  shown.whole.reset();
  if (const auto& shared = shown.found.param().sharded.shared()) shared->set_aside(true);
  accumulated_grad(shown.unsharded_param) = with_gradient ? std::move(shown.whole_gradient) : at::Tensor();
  for (const auto& place : shown.places)
    ModuleAccess::parameters(*place.module)[place.slot].value() = shown.unsharded_param;
}

void ShownParameters::write_back(Shown& shown) const {
  const auto& param = shown.found.param();
  at::NoGradGuard no_grad;
  require(shown.unsharded_param.sizes() == c10::IntArrayRef(param.spec.sizes()), "its sizes became {}, expected {}",
          fmt::join(shown.unsharded_param.sizes(), "x"), fmt::join(param.spec.sizes(), "x"));
  if (static_cast<int64_t>(shown.sharded_param._version()) != shown.version)
    log().warn("{}: the sharded parameter was written inside FullParameters; the values of the full parameter replace it",
               param.name());
  const auto sharded_param = plain_view(shown.sharded_param);
  const auto own = own_values(shown.found, shown.unsharded_param).to(sharded_param.options());
  // A write that changes nothing would have everything gathered again.
  if (!at::equal(as_bytes(own), as_bytes(sharded_param))) sharded_param.copy_(own);
  if (!options_.with_grads) return;
  write_back_gradient(shown);
  if (const auto& classes = shown.found.group->parts().local_shards) classes->refresh(*shown.found.group);
}

void ShownParameters::write_back_gradient(Shown& shown) {
  const auto whole = accumulated_grad(shown.unsharded_param);
  auto& gradient = shown.sharded_param.mutable_grad();
  if (!whole.defined()) {
    gradient.reset();
    return;
  }
  const auto own = own_values(shown.found, whole);
  if (gradient.defined()) {
    gradient.copy_(own);
    return;
  }
  const auto& asked = shown.found.param().grad_dtype();
  const auto dtype = asked.is_set ? asked.dtype.value_or(own.scalar_type()) : shown.sharded_param.scalar_type();
  gradient = own.to(shown.sharded_param.device(), dtype, /*non_blocking=*/false, /*copy=*/true);
}

void ShownParameters::restore(Shown& shown) {
  shown.found.param().unsharded.restore(shown.found.param().spec, std::exchange(shown.storage, {}));
  if (const auto& shared = shown.found.param().sharded.shared()) shared->set_aside(false);
  accumulated_grad(shown.unsharded_param) = std::move(shown.unreduced_gradient);
  for (const auto& place : shown.places) {
    auto& table = ModuleAccess::parameters(*place.module);
    if (place.slot < table.size()) table[place.slot].value() = shown.registered_param;
  }
}

}  // namespace fsdp
