#include "fsdp/clone.hpp"

#include <ATen/ATen.h>

#include "api/shard/shard_like.hpp"
#include "base/require.hpp"
#include "module/module_access.hpp"
#include "root/find_param.hpp"

// A copy in two steps: LibTorch's clone() makes the structure, plain and of full size, out of stand-ins;
// then the copy is sharded like the original and takes its shards over.
namespace fsdp {

namespace {

using torch::nn::Module;

/// While it lives, the tables of the tree hold tensors of the full sizes, of one element each, in the
/// place of sharded parameters.
class StandIns {
 public:
  explicit StandIns(Module& module) { visit(module); }
  ~StandIns() {
    for (auto& [module, slot, sharded_param] : replaced_)
      ModuleAccess::parameters(*module)[slot].value() = sharded_param;
  }
  StandIns(const StandIns&) = delete;
  StandIns& operator=(const StandIns&) = delete;

 private:
  struct Replaced {
    Module* module;
    size_t slot;
    at::Tensor sharded_param;
  };
  void visit(Module& module) {
    auto& table = ModuleAccess::parameters(module);
    for (size_t slot = 0; slot < table.size(); ++slot) {
      auto& entry = table[slot].value();
      const auto found = find_param(entry);
      if (!found) continue;
      const auto options = at::TensorOptions().dtype(entry.scalar_type()).device(entry.device());
      auto stand_in = at::zeros({}, options).expand(found->param().spec.sizes());
      replaced_.push_back({&module, slot, std::exchange(entry, std::move(stand_in))});
    }
    for (const auto& child : module.named_children())
      if (child.value()) visit(*child.value());
  }
  std::vector<Replaced> replaced_;
};

std::shared_ptr<Module> clone_plain(Module& module) {
  try {
    StandIns stand_ins(module);
    auto copy = module.clone();
    require(copy != nullptr, "clone: {}'s clone() returned nothing", module.name());
    return copy;
  } catch (const c10::Error& error) {
    throw UsageError(fmt::format("clone: LibTorch's clone() of {} failed: {}. Its class, and those of its "
                                 "submodules, must derive from torch::nn::Cloneable and make their members "
                                 "in reset()",
                                 module.name(), error.what_without_backtrace()));
  }
}

}  // namespace

std::shared_ptr<Module> clone(Module& module, const CloneOptions& options) {
  check_copyable(module);
  at::NoGradGuard no_grad;
  auto copy = clone_plain(module);
  if (options.prepare) {
    at::AutoGradMode grad(true);
    options.prepare(*copy);
  }
  shard_like(module, copy);
  return copy;
}

}  // namespace fsdp
