#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "dispatch/param_owner.hpp"
#include "group/eval_precision.hpp"
#include "group/gather/unsharder.hpp"
#include "group/notes/group_notes.hpp"
#include "group/group_parts.hpp"
#include "group/local_shards.hpp"
#include "group/reduce/group_gradients.hpp"
#include "group/tied_params.hpp"

namespace fsdp {

/// The parameters that are gathered and released together: what they are made of, and who does what with them. When they
/// are gathered, released and reduced is others' business. Not thread-safe: its root's lock guards it.
class ParamGroup final {
 public:
  /// Copies this rank's rows out of the unsharded parameters (as they are at one rank, without a copy). Nothing
  /// that the module holds has changed when this returns; `attach` does that.
  /// link: to whom operators on its parameters turn, and who it is a part of.
  ParamGroup(OwnerLink link, GroupIdentity identity, GroupConfig config, const std::vector<GroupParam>& params);
  ParamGroup(const ParamGroup&) = delete;
  ParamGroup& operator=(const ParamGroup&) = delete;

  /// The values of parameters that another group holds and cuts in another way: a collective call where
  /// there are such, between the constructor and `attach`. Changes nothing else.
  void gather_tied() { fsdp::gather_tied(parts_, tied_); }
  /// Before `attach`, of parameters that are whole here: notes what ranks compare at the first step.
  void note_first_values();
  /// Null: nothing was noted, or it has been taken.
  std::unique_ptr<FirstValues> take_first_values() { return notes_.take_first_values(); }
  /// Those that other groups hold, to be taken from them before `attach`.
  std::vector<TiedParam> take_ties() { return std::exchange(tied_, {}); }
  /// Turns the tensors into unsharded parameters. Does not fail halfway: all allocations come before.
  void attach();

  GroupParts& parts() { return parts_; }
  const GroupParts& parts() const { return parts_; }
  GroupIdentity& identity() { return parts_.identity; }
  const GroupIdentity& identity() const { return parts_.identity; }
  const std::string& name() const { return parts_.identity.name; }
  const GroupConfig& config() const { return parts_.config; }
  void rename(std::string name, const std::vector<std::string>& param_names);
  std::vector<FSDPParam>& params() { return parts_.params; }
  const std::vector<FSDPParam>& params() const { return parts_.params; }
  const GroupLayout& layout() const { return parts_.layout; }
  CommContext* comm_ctx() const { return parts_.comm_ctx; }
  Unsharder& unsharder() { return unsharder_; }
  const Unsharder& unsharder() const { return unsharder_; }
  /// Its root sets it (RootContext::set_policy).
  const GroupPolicy& policy() const { return policy_; }
  template <class Value>
  void set_policy(Value GroupPolicy::*option, Value value) {
    policy_.*option = std::move(value);
  }
  ReductionConfig& reduction() { return gradients_.config; }
  const ReductionConfig& reduction() const { return gradients_.config; }
  size_t trainable_count() const { return gradients_.trainable_count; }
  std::vector<ReducePart>& kept_parts() { return gradients_.kept_parts; }

  // --- gathers and reductions in registered memory
  /// From the next gather and reduction on, in slots (gather_slots.hpp, reduction_slots.hpp); while the group is
  /// released and not reduced.
  void set_symmetric_memory(bool value);
  bool has_symmetric_memory() const { return has_symmetric_memory_; }
  /// What travels as it lies in the shard does; what is packed for a custom collective or an extension does not.
  bool uses_slots() const;
  /// What is packed for a reduction is, but for a custom collective.
  bool reduces_in_slots() const;

  // --- what users write and change
  /// True if a sharded parameter has been written since the gather that the unsharded parameters show (or the last one, if they show
  /// nothing).
  bool is_stale() const { return is_outdated_ || parts_.has_writes(); }
  /// In front of a gather, which takes over what has been written. Throws StateError where there is nothing to gather.
  void prepare_unshard();
  /// Puts replaced storages back and follows versions: before every gather of a stale group, and
  /// instead of it where nothing is ever released.
  void refresh() {
    validate();
    sync_versions();
  }
  /// Same values in unsharded parameters and sharded parameters from now on, wherever they came from.
  void sync_versions();
  /// Returns whether a parameter changed.
  bool sync_requires_grad();
  /// Anew, after what may have changed it.
  void count_trainable();
  /// Finds what no operator showed: replaced storages, tensors and members (T17). Mends or throws.
  void validate();

  GroupNotes& notes() { return notes_; }
  EvalPrecision& eval_precision() { return eval_precision_; }
  const EvalPrecision& eval_precision() const { return eval_precision_; }

  /// P5. Null until they are handed out (make_local_shards).
  LocalShards* classes() { return classes_.get(); }
  void set_classes(std::unique_ptr<LocalShards> classes) { classes_ = std::move(classes); }
  const OwnerLink& link() const { return link_; }
  ParamOwner& owner() const { return **link_; }
  /// Keeps its owner alive, too.
  std::shared_ptr<ParamGroup> share() { return {owner().shared_from_this(), this}; }

  /// What is gathered, and how, follows; of a released group.
  void set_layout(GroupLayout layout);
  /// This rank's rows go to `shard`, which is zero and laid out so, and the sharded parameters with them.
  void move_rows(GroupLayout layout, at::Tensor shard);

  GradientStore& gradients() { return gradients_.store; }
  const GradientStore& gradients() const { return gradients_.store; }
  GradientDtypes& gradient_dtypes() { return gradients_.dtypes; }
  const GradientDtypes& gradient_dtypes() const { return gradients_.dtypes; }
  /// Looks for a `grad_dtype` that a user has changed.
  void sync_grad_dtypes();

  /// Sharded parameter `index`, or the local shard behind those, has been written. Whoever writes past operators tells `owner`
  /// of it (ParamOwner::note_write), which also makes the next use look.
  void bump_versions(size_t index);
  /// Of what operators on parameter `index` return, where it is not their own choice.
  std::optional<at::ScalarType> output_dtype(size_t index) const {
    return eval_precision_.is_own_dtype() ? std::nullopt : parts_.params[index].spec.output_dtype;
  }

 private:
  void make_rows();

  OwnerLink link_;
  GroupParts parts_;
  Unsharder unsharder_;
  GroupPolicy policy_;
  GroupGradients gradients_;
  std::vector<TiedParam> tied_;   // until attach
  std::unique_ptr<LocalShards> classes_;
  EvalPrecision eval_precision_;
  bool has_symmetric_memory_ = false;
  GroupNotes notes_;
  bool is_outdated_ = false;  // versions have been followed since the last gather, values not
};

}  // namespace fsdp
