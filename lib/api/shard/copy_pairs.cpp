#include "api/shard/copy_pairs.hpp"

#include "base/require.hpp"
#include "module/module_access.hpp"
#include "module/module_path.hpp"

namespace fsdp {

namespace {

using torch::nn::Module;

/// Walks both trees at once.
class Pairing {
 public:
  CopyPairs run(const Module& original, const std::shared_ptr<Module>& copy) {
    visit(original, copy, "");
    return std::move(pairs_);
  }

 private:
  void visit(const Module& original, const std::shared_ptr<Module>& copy, const std::string& path) {
    const auto [known, is_new] = pairs_.modules.emplace(&original, copy);
    require(is_new || known->second == copy,
            "clone: the module at '{}' is registered in two places, but the copy has two modules there; register one module "
            "under both names in reset()",
            path);
    if (!is_new) return;
    visit_parameters(original, copy, path);
    const auto buffers_of_copy = copy->named_buffers(/*recurse=*/false);
    for (const auto& buffer : original.named_buffers(/*recurse=*/false))
      if (const auto* found = buffers_of_copy.find(buffer.key()))
        pairs_.buffers.emplace(buffer.value().unsafeGetTensorImpl(), *found);
    const auto children = original.named_children(), copies = copy->named_children();
    require(children.size() == copies.size(), "clone: '{}' has {} submodules, its copy {}; make the same ones in reset()", path,
            children.size(), copies.size());
    for (const auto& child : children) {
      const auto* found = copies.find(child.key());
      const auto below = join_path(path, child.key());
      require(found != nullptr && (*found == nullptr) == (child.value() == nullptr),
              "clone: the copy has no module '{}'; make it in reset()", below);
      if (child.value()) visit(*child.value(), *found, below);
    }
  }

  void visit_parameters(const Module& original, const std::shared_ptr<Module>& copy, const std::string& path) {
    const auto& table = ModuleAccess::parameters(original);
    const auto& copies = ModuleAccess::parameters(*copy);
    for (size_t slot = 0; slot < table.size(); ++slot) {
      const auto name = join_path(path, table[slot].key());
      require(slot < copies.size() && copies[slot].key() == table[slot].key(),
              "clone: the copy has no parameter '{}'; register it in reset()", name);
      const auto& tensor = table[slot].value();
      if (!tensor.defined()) continue;
      require(copies[slot].value().defined(), "clone: the copy has no parameter '{}'; register it in reset()", name);
      auto& paired = param_of(tensor);
      paired.param = find_param(tensor);
      paired.entries.push_back({copy, slot, name});
    }
  }

  CopiedParam& param_of(const at::Tensor& tensor) {
    const auto [known, is_new] = indices_.emplace(tensor.unsafeGetTensorImpl(), pairs_.params.size());
    if (is_new) pairs_.params.push_back({.original = tensor, .param = {}});
    return pairs_.params[known->second];
  }

  CopyPairs pairs_;
  std::unordered_map<const c10::TensorImpl*, size_t> indices_;  // of the parameters
};

}  // namespace

at::Tensor& CopiedEntry::tensor() const { return ModuleAccess::parameters(*module)[slot].value(); }

CopyPairs pair_with_copy(const Module& original, const std::shared_ptr<Module>& copy) {
  return Pairing().run(original, copy);
}

}  // namespace fsdp
