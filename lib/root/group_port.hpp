#pragma once

#include <memory>
#include <mutex>
#include <utility>

#include "base/side_stream.hpp"
#include "group/param_group.hpp"
#include "root/root_context.hpp"

namespace fsdp {

/// What lives as long as a group: its module's state.
class GroupHolder {
 public:
  virtual ~GroupHolder() = default;
};

/// How operators and autograd reach a group: what they do goes to its root, which does with the group what it has to. The
/// storages behind the group's unsharded parameters keep it alive; it dies with the module.
class GroupPort final : public ParamOwner {
 public:
  /// See ParamGroup's.
  GroupPort(GroupIdentity identity, GroupConfig config, const std::vector<GroupParam>& params);
  ~GroupPort() override;
  static GroupPort& of(const ParamGroup& group) { return static_cast<GroupPort&>(group.parts().owner()); }

  ParamGroup& group() { return group_; }
  /// Keeps this alive, too.
  std::shared_ptr<ParamGroup> share_group() { return {shared_from_this(), &group_}; }
  /// Whose the group is; null before RootContext::add.
  const std::shared_ptr<RootContext>& root() const { return root_; }
  void set_root(std::shared_ptr<RootContext> root) { root_ = std::move(root); }
  /// Null until the module layer sets it.
  const std::shared_ptr<GroupHolder>& holder() const { return holder_; }
  void set_holder(std::shared_ptr<GroupHolder> holder) { holder_ = std::move(holder); }
  /// Turns the tensors into unsharded parameters, with hooks that tell of their gradients. Does not fail halfway: all
  /// allocations that matter come before.
  void attach();

  /// On the current stream.
  void mark_ready(int64_t task) {
    const auto device = group_.parts().config.device;
    set_ready(task, SideStream::exists_on(device) ? std::optional(current_stream(device)) : std::nullopt);
  }
  void mark_not_ready() { set_ready(kNotReady); }
  void mark_between_steps(bool value) { set_between_steps(value); }

 private:
  // --- ParamOwner
  void make_resident(std::span<ParamOwner* const> owners, const OperatorUse& use) override;
  void carry_write(size_t index) override;
  void follow_mode() override;
  void take_over_requires_grad(size_t index) override;
  bool is_in_scope() const override;
  at::Tensor unsharded_param(size_t index) const override { return group_.params()[index].unsharded_param(); }
  at::Tensor recorded_param(size_t index) const override;
  at::Tensor sharded_param(size_t index) const override { return group_.params()[index].sharded_param(); }
  const at::TensorImpl* sharded_identity(size_t index) const override {
    return index < group_.params().size() ? group_.params()[index].sharded.identity() : nullptr;
  }
  void unsharded_storage_gone(size_t index) noexcept override { group_.params()[index].unsharded.storage_gone(); }
  void note_write(size_t index) override;
  const std::string& param_name(size_t index) const override {
    return index < group_.params().size() ? group_.params()[index].name() : group_.name();
  }
  std::optional<at::ScalarType> output_dtype(size_t index) const override { return group_.parts().output_dtype(index); }

  OwnerLink link_ = std::make_shared<ParamOwner*>(this);
  std::shared_ptr<RootContext> root_;
  std::shared_ptr<GroupHolder> holder_;
  ParamGroup group_;  // last: it goes before its root does
};

/// The unsharded parameter of a tensor-parallel one, or its gradient, is less than the DTensor: the other ranks' parts are
/// gathered, and autograd leads back to this one. Of any other parameter: the tensor itself.
at::Tensor whole_of_part(const FSDPParam& param, const at::Tensor& unsharded);

/// A group that is reached by a port of its own; the port lives as long as this.
std::shared_ptr<ParamGroup> make_group(GroupIdentity identity, GroupConfig config, const std::vector<GroupParam>& params);

/// Whose the group is: from RootContext::add on.
inline RootContext& root_of(const ParamGroup& group) { return *GroupPort::of(group).root(); }

}  // namespace fsdp
