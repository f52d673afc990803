#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "collectives/all_gather.hpp"
#include "group/gradient_division.hpp"
#include "group/gradient_tally.hpp"
#include "group/group_layout.hpp"
#include "group/group_spec.hpp"
#include "group/home_copies.hpp"
#include "group/local_classes.hpp"
#include "group/reduction_config.hpp"
#include "group/wire_gather.hpp"
#include "param/left_storage.hpp"
#include "param/residency_owner.hpp"
#include "param/sharded_param.hpp"
#include "schedule/holds.hpp"
#include "trace/first_values.hpp"
#include "trace/group_identity.hpp"

namespace fsdp {

struct CommContext;
class GroupSanitizer;
class RootContext;

/// The parameters that are gathered and released together.
///
/// It knows how to become readable and how to let go; *when* is its root's business, to which it
/// passes on every touch. The storages behind its handles keep it alive; it dies with the module.
/// Not thread-safe: the root's lock guards it.
class ParamGroup final : public ResidencyOwner, public std::enable_shared_from_this<ParamGroup> {
 public:
  /// Copies this rank's rows out of the handles (as they are at one rank, without a copy). Nothing
  /// that the module holds has changed when this returns; `attach` does that.
  ParamGroup(GroupIdentity identity, GroupConfig config, const std::vector<GroupParam>& params);
  ~ParamGroup() override;

  /// The values of parameters that another group holds and cuts in another way: a collective call where
  /// there are such, between the constructor and `attach`. Changes nothing else.
  void gather_taken();
  /// Before `attach`, of parameters that are whole here: notes what ranks compare at the first step.
  void note_first_values();
  /// Null: nothing was noted, or it has been taken.
  std::unique_ptr<FirstValues> take_first_values() { return std::move(first_values_); }
  /// Turns the tensors into handles. Does not fail halfway: all allocations come before.
  void attach();

  const std::string& name() const { return identity.name; }
  const GroupConfig& config() const { return config_; }
  void rename(std::string name, const std::vector<std::string>& param_names);
  std::vector<ShardedParam>& params() { return params_; }
  const std::vector<ShardedParam>& params() const { return params_; }
  const ParamSpread& spread(size_t index) const { return spreads_[index]; }
  GroupPolicy& policy() { return policy_; }
  const GroupPolicy& policy() const { return policy_; }
  ReductionConfig& reduction() { return reduction_; }
  const ReductionConfig& reduction() const { return reduction_; }
  /// How many parameters need a gradient, as of the last `sync_requires_grad`.
  size_t trainable_count() const { return trainable_count_; }

  // --- residency, as the root asks for it
  /// Starts the gather unless the group is unsharded or it has started. Never waits.
  void unshard();
  /// Finishes the gather; handles are readable when this returns. Throws CommError; sharded then.
  void wait_for_unshard();
  /// Releases the unsharded parameters, or gives up a gather under way, and drops what `reshard_after_forward` kept.
  /// Nothing is lost.
  void reshard();
  /// Releases after forward: keeps this rank's piece for the smaller gather where the policy says so.
  void reshard_after_forward();
  /// From the next gather on; not in a step (group_gather.cpp). Null: the group's communicator's own.
  void set_custom_all_gather(std::shared_ptr<AllGatherComm> comm);
  const std::shared_ptr<AllGatherComm>& custom_all_gather() const { return custom_all_gather_; }
  /// From the next gather and reduction on, in slots (gather_slots.hpp, reduction_slots.hpp); while the group is
  /// released and not reduced.
  void set_symmetric_memory(bool value);
  bool has_symmetric_memory() const { return has_symmetric_memory_; }
  /// What travels as it lies in the shard does; what is packed for a custom collective or an extension does not.
  bool uses_slots() const;
  /// What is packed for a reduction is, but for a custom collective.
  bool reduces_in_slots() const;
  /// Unsharded, and packed beside it what is too small to travel by itself.
  int64_t slot_bytes() const { return layout_.gathered().gather_bytes(); }
  /// Another group's gather needs the slot that this one may be in: parameters that are unsharded, or being gathered,
  /// go on in memory of their own. This rank's business: no communication but waiting.
  void leave_slot();
  /// Keeps the unsharded buffer when the group is released, and fills it again.
  void set_keep_unsharded_storage(bool keep);
  bool keeps_unsharded_storage() const { return keeps_storage_; }
  int64_t kept_bytes() const { return kept_.defined() ? kept_.numel() : 0; }
  /// Drops what `reshard_after_forward` kept.
  void drop_post_forward_shard() { post_forward_.shard.reset(); }
  bool is_unsharded() const { return is_unsharded_; }
  bool is_gathering() const { return gather_.in_progress(); }
  /// Null: none, or one that sends nothing.
  Work* gather_under_way() const { return gather_.work.get(); }
  bool is_held() const { return is_unsharded_ || is_gathering(); }
  /// True if a registered parameter has been written since the gather that the handles show (or the
  /// last one, if they show nothing).
  bool is_stale() const { return needs_gather_ || was_changed(); }
  /// One rank and no casts: handles alias the registered parameters for ever.
  bool is_never_released() const {
    return identity.mesh_info.shard_size() == 1 && !is_cast_ && !config_.home;
  }
  /// Bytes that `unshard` makes live.
  int64_t unsharded_bytes() const { return layout_.gathered().total_bytes(); }
  int64_t sharded_bytes() const { return layout_.stored().rank_bytes(); }
  const GroupLayout& layout() const { return layout_; }

  /// Null unless the sanitizer mode is on.
  GroupSanitizer* sanitizer() const { return sanitizer_.get(); }
  /// What the group's collectives are launched on: `comm`, or in the sanitizer mode one that is late.
  Communicator& launched_on(Communicator& comm) const;

  /// Brings replaced storages home and follows versions: before every gather of a stale group, and
  /// instead of it where nothing is ever released.
  void take_changes() {
    audit();
    follow_versions();
  }
  /// Same values in handles and registered parameters from now on, wherever they came from.
  void follow_versions();
  /// Returns whether a parameter changed.
  bool sync_requires_grad();
  /// Finds what no operator showed: replaced storages, tensors and members (T17). Mends or throws.
  void audit();

  /// In a step's beginning: what there is to say in the log, once (group_notes.cpp).
  void say_new_notes() {
    if (has_notes_) [[unlikely]]
      say_notes();
  }

  /// Counts reductions after which nobody has ever written a parameter: the mark of an optimizer
  /// that was built before fully_shard and holds handles. Warns once by name.
  void note_reduction();

  /// Other dtypes, another device (group_conversion.cpp): handles, shards and gradients, with what waits
  /// for a reduction; who holds one of the tensors keeps it. From the meta device: shards of zeros. No
  /// communication. If memory runs out, nothing has changed.
  /// Throws StateError inside a step or a scope.
  void convert(const GroupConversion& to);
  /// Throws what `convert` would throw.
  void check_convertible(const GroupConversion& to = {}) const;

  /// full_precision_in_eval (compute_dtype.cpp): handles are in the parameters' own dtype, or in the
  /// policy's. Releases them if that is another one. Nothing else changes; no communication.
  void compute_in_own_dtype(bool value);
  bool computes_in_own_dtype() const { return computes_in_own_dtype_; }
  /// Of the module, now; empty where the policy does not ask for it.
  std::function<bool()> wants_own_dtype;
  /// Throws StateError if the module's mode has changed since the step began.
  void check_mode() const;

  /// Where gradients and shards live: the CPU, where they are offloaded.
  c10::Device home_device() const;
  /// A gradient on the device, where the user is to find it. target: write it there; undefined: anywhere.
  at::Tensor bring_home(const at::Tensor& gradient, HomeCopies::Pace pace, const at::Tensor& target);
  /// All copies are done: the host may read gradients and write shards.
  void wait_for_copies() { copies_.wait(); }

  /// P5 (local_classes.cpp). Null until they are handed out.
  LocalClasses* classes() { return classes_.get(); }
  /// Parameters of one class lie side by side in this rank's shard from now on, which the classes alias.
  /// labels: by parameter. Handed out already: checks that the labels are the same.
  LocalClasses& hand_out_classes(const std::vector<std::string>& labels);
  const OwnerLink& link() const { return link_; }

  // --- dtypes of gradients (gradient_dtypes.cpp)
  /// What the gradients of parameter `index` are added up in. gradient: the dtype of one that is there, which counts
  /// where any is taken.
  at::ScalarType reduce_dtype(size_t index, const std::optional<at::ScalarType>& gradient = {}) const;
  /// Its gradients are reduced in whatever dtype autograd makes.
  bool takes_any_gradient(size_t index) const;
  /// Those of one of its parameters are.
  bool takes_any_gradient() const { return takes_any_gradient_; }
  /// All gradients that are reduced together are in the dtype that theirs promote to.
  bool promotes_reductions() const;
  /// That a reduced gradient has on the registered parameter; none: the one that it was reduced in.
  std::optional<at::ScalarType> gradient_dtype(size_t index) const;
  /// Looks for a `grad_dtype` that a user has changed.
  void sync_grad_dtypes();
  /// From what the policy, the reduction and the parameters say now.
  void plan_gradient_dtypes();

  void mark_ready(int64_t task) { set_ready(task); }
  void mark_not_ready() { set_ready(kNotReady); }
  void mark_between_steps(bool value) { set_between_steps(value); }

  // --- ResidencyOwner
  void make_resident(std::span<ResidencyOwner* const> owners, const OperatorUse& use) override;
  void carry_write(size_t index) override;
  void follow_mode() override;
  void take_over_requires_grad(size_t index) override;
  bool is_in_scope() const override;
  at::Tensor handle(size_t index) const override { return params_[index].handle(); }
  const at::TensorImpl* registered(size_t index) const override {
    return index < params_.size() ? params_[index].registered_impl() : nullptr;
  }
  void handle_storage_gone(size_t index) noexcept override;
  void note_registered_write(size_t index) override {
    if (index < params_.size())
      params_[index].bump_version();
    else
      for (const size_t member : classes_->members(index - params_.size())) params_[member].bump_version();
    mark_not_ready();  // the next touch is to see it
  }
  const std::string& param_name(size_t index) const override {
    return index < params_.size() ? params_[index].name() : identity.name;
  }
  bool is_cut() const override { return identity.mesh_info.shard_size() > 1; }
  std::optional<at::ScalarType> output_dtype(size_t index) const override {
    return computes_in_own_dtype_ ? std::nullopt : output_dtypes_[index];
  }

  GradientTally tally;
  Divisor divisor;

  // --- place in the root, kept by RootContext and the module layer
  std::shared_ptr<RootContext> context;
  CommContext* comm_ctx = nullptr;  ///< the root's; null until there is one
  std::shared_ptr<void> companion;  ///< what is to live as long as the group: its module's state
  GroupIdentity identity;           ///< its number is the root's to give, names are the module layer's
  struct {
    int enter = 0, exit = 0;
  } tree;  ///< depth-first interval of the owning module
  Holds holds;                      ///< why it stays where nothing uses it
  int read_after_reduction = 0;  ///< the last backward that has used it again after its last gradient; 0: none
  /// Its module is around the other's, or the same.
  bool encloses(const ParamGroup& other) const {
    return this != &other && tree.enter <= other.tree.enter && other.tree.exit <= tree.exit;
  }

 private:
  bool was_changed() const;
  void make_pieces();
  /// What is gathered, and how, follows; buffers of the old layout go.
  void set_layout(GroupLayout layout);
  /// This rank's parts go to `shard`, which is zero, and the registered parameters with them.
  void move_pieces(GroupLayout layout, at::Tensor shard);
  // parameters that go from group to group (taken_params.cpp)
  struct Taken {
    size_t index;  // here
    HeldElsewhere from;
    at::Tensor gradient = {};  // this rank's part, where it had to be cut anew
  };
  bool is_cut_alike(const Taken& taken) const;
  at::Tensor piece_of(const Taken& taken) const;
  void copy_taken_pieces();
  void take(const Taken& taken);
  void give_up(size_t index);
  void close_gaps();
  void release();
  void note_launch();
  void wait_for_launch();
  void let_memory_wait() const;
  void show(at::Tensor unsharded);
  void note_shown();
  at::Tensor make_shard(int64_t bytes, c10::Device device) const;
  at::Tensor gather_input();
  at::Tensor shard_on_device();
  HomeCopies::Pace copy_pace(bool may_overlap) const {
    const bool overlaps = may_overlap && config_.home && config_.home->is_pinned;
    return overlaps ? HomeCopies::Pace::kOverlapped : HomeCopies::Pace::kBlocking;
  }
  at::Tensor pack(const at::Tensor& shard) const;
  const PieceLayout& travelling(bool is_regathered) const;
  GatherMemory slot_memory();
  void give_up_gather() noexcept;
  AllGather start_gather(Communicator& comm, bool is_regathered);
  AllGather start_gather_of_shard(Communicator& comm, GatherMemory memory);
  at::Tensor finish_gather(AllGather gather) const;
  int64_t planned_gather_bytes(bool is_regathered) const;
  int64_t unpacked_bytes(const AllGather& gather) const;  // of those, what finish_gather allocates
  std::vector<at::ScalarType> dtypes() const;
  void check_extensions(const std::vector<at::ScalarType>& dtypes) const;
  std::unique_ptr<WireGather> make_wire(const GroupLayout& layout, std::vector<at::ScalarType> dtypes) const;
  WireGather::Group wire_group() const { return {layout_, params_}; }
  void show_pieces();
  void check_class_gradients(const std::vector<LocalClasses::Class>& classes) const;
  void refresh_classes();
  void count_trainable();
  void say_notes();
  void note_mixture() const;
  std::optional<at::ScalarType> own_reduce_dtype(size_t index) const;
  struct Dtypes {  // by parameter
    std::vector<at::ScalarType> stored, gathered;
    std::vector<GroupLayout::Itemsizes> itemsizes;
    bool is_cast = false;  // one is gathered in another dtype than it is kept in
    bool changes = false;  // one differs from what it is now
  };
  Dtypes dtypes_in(std::optional<at::ScalarType> floating, bool in_own_dtype) const;
  struct Remade;  // what convert makes before it changes anything
  Remade remake(const GroupConversion& to) const;
  void fill(Remade& made) const;
  void convert_waiting_gradients(c10::Device device);

  GroupConfig config_;
  OwnerLink link_ = std::make_shared<ResidencyOwner*>(this);
  GroupPolicy policy_;
  ReductionConfig reduction_;
  std::vector<ShardedParam> params_;
  std::vector<Taken> taken_;  // until attach
  std::vector<std::optional<at::ScalarType>> output_dtypes_;
  std::vector<ParamSpread> spreads_;
  std::vector<std::optional<at::ScalarType>> asked_dtypes_;  // param_dtype, where the policy has one
  std::vector<at::ScalarType> reduce_dtypes_;                 // by parameter
  bool takes_any_gradient_ = false;
  GroupLayout layout_;
  HomeCopies copies_;
  std::unique_ptr<LocalClasses> classes_;
  bool computes_in_own_dtype_ = false;
  bool is_cast_ = false;           // a parameter is gathered in another dtype than it is kept in
  at::Tensor shard_;               // pieces of this rank, 1-D bytes; undefined at one rank
  std::vector<at::Tensor> pieces_;  // views of it; at one rank the parameters' own memory
  struct {
    PieceLayout layout;
    at::Tensor shard;
  } post_forward_;  // this rank's pieces for the gather over fewer ranks; none: undefined
  Extensions extensions_;                            // by parameter
  std::shared_ptr<AllGatherComm> custom_all_gather_;  // none: the communicator's own
  std::unique_ptr<WireGather> wire_;  // not null: the group does not travel as it lies in the shard
  AllGather gather_;
  at::Tensor unsharded_;
  at::Tensor kept_;  // the buffer of a released group that keeps it
  std::vector<at::Tensor> sent_;  // views of shard_, as gathers send it
  bool keeps_storage_ = false;
  bool has_symmetric_memory_ = false;
  bool is_in_slot_ = false;  // of the last gather
  std::optional<c10::Stream> launched_on_, unpacked_on_;  // of the last gather, where there are streams: its memory's
  std::optional<c10::Event> launched_, released_;         // behind a launch, and behind the last use of what is kept
  LeftStorages left_;
  size_t trainable_count_ = 0;
  bool has_notes_ = false;
  bool is_unsharded_ = false;
  bool needs_gather_ = false;  // versions have been followed since, values not
  bool was_written_ = false;  // by anybody but through a handle, since the first reduction
  int reductions_before_write_ = 0;
  std::unique_ptr<GroupSanitizer> sanitizer_;
  std::unique_ptr<FirstValues> first_values_;
};

}  // namespace fsdp
