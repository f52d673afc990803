#include "api/state_dict/named_states.hpp"

#include <unordered_map>

#include "base/require.hpp"
#include "fsdp/fully_shard.hpp"
#include "module/handles.hpp"
#include "module/module_access.hpp"
#include "module/module_path.hpp"
#include "module/state/module_table.hpp"
#include "root/group_port.hpp"

namespace fsdp {

namespace {

using torch::nn::Module;

class Walk {
 public:
  std::vector<NamedState> run(const Module& module) {
    visit(module, "");
    for (auto& state : states_)
      if (const auto cast = dtypes_.find(state.tensor.unsafeGetTensorImpl()); cast != dtypes_.end())
        state.dtype_before_cast = cast->second;
    return std::move(states_);
  }

 private:
  void visit(const Module& module, const std::string& path) {
    if (const auto state = find_state(module)) note_dtypes(*state);
    const auto& table = ModuleAccess::parameters(module);
    for (size_t slot = 0; slot < table.size(); ++slot)
      add_parameter(module, slot, join_path(path, table[slot].key()));
    for (const auto& buffer : module.named_buffers(/*recurse=*/false))
      if (buffer.value().defined()) add(buffer.value(), join_path(path, buffer.key()));
    for (const auto& child : module.named_children())
      if (child.value()) visit(*child.value(), join_path(path, child.key()));
  }

  void add_parameter(const Module& module, size_t slot, std::string name) {
    const auto& tensor = ModuleAccess::parameters(module)[slot].value();
    if (!tensor.defined()) return;  // as Linear(bias=false) registers it
    auto& state = add(tensor, std::move(name));
    if (state.names.size() > 1) return;
    state.param = find_param(tensor);
    // The group's module may lie above the part of the tree that is walked.
    if (state.param)
      if (const auto owner = ModuleState::of(*state.param->group))
        note_dtypes(*owner);
  }

  NamedState& add(const at::Tensor& tensor, std::string name) {
    const auto [found, is_new] = known_.emplace(tensor.unsafeGetTensorImpl(), states_.size());
    if (is_new) states_.push_back({.names = {}, .tensor = tensor, .param = {}, .dtype_before_cast = {}});
    auto& state = states_[found->second];
    state.names.push_back(std::move(name));
    return state;
  }

  void note_dtypes(ModuleState& state) {
    for (const auto& cast : state.precision().cast_buffers())
      if (const auto buffer = cast.buffer.lock(); buffer.defined()) dtypes_[buffer.get()] = cast.dtype;
  }

  std::vector<NamedState> states_;
  std::unordered_map<const c10::TensorImpl*, size_t> known_;
  std::unordered_map<const c10::TensorImpl*, at::ScalarType> dtypes_;
};

}  // namespace

std::vector<NamedState> named_states(const Module& module) { return Walk().run(module); }

void require_not_shown(const Module& module, std::string_view caller) {
  for (const auto& root : roots(module)) {
    auto& context = *handles::state(root).root()->context();
    require_state(!context.step().is_pinned(),
                  "{}: cannot be called while the module shows full parameters (fsdp::FullParameters); end that scope first",
                  caller);
    bring_home(context);
  }
}

void bring_home(RootContext& context) {
  std::lock_guard lock(context.mutex());
  for (auto* group : context.runner().groups()) group->changes().validate();
}

}  // namespace fsdp
