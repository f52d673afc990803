#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <vector>

#include "root/root_context.hpp"
#include "schedule/forward_passes.hpp"
#include "schedule/shows.hpp"

namespace fsdp {

/// The forwards of one call of fully_shard, where hooks around them tell of their modules' boundaries, and what these modules
/// show of their parameters. C++ modules have none: their operators tell.
///
/// Threads: every function takes the root's lock or says that its caller holds it, as `on` does.
class ModulePass : public std::enable_shared_from_this<ModulePass> {
 public:
  /// Who puts parameters into modules' tables. All are called with the root's lock and the host lock held.
  class View {
   public:
    virtual ~View() = default;
    /// The modules show so from now on.
    virtual void show(Shows form) = 0;
    /// Takes what users have put in the place of parameters, outside a step, before the root's first use.
    virtual void begin() = 0;
    /// Takes that before a step, and looks at modules that users have added.
    virtual void take_changes() = 0;
    /// Brings what users have changed of parameters to the sharded ones, before a step or a backward.
    virtual void take_over() = 0;
    virtual void show_gradients() = 0;
  };

  /// modules: of the call.
  ModulePass(std::weak_ptr<View> view, size_t modules) : view_(std::move(view)), forwards_(modules) {}

  /// Lets all views of the root's modules begin, outside a step, unless they have. May throw; it is to be called again then.
  void begin(RootContext& root);

  // --- on the thread of the forward
  /// Is the first thing that the hook in front of a module's forward does.
  void try_to_enter(RootContext& root, size_t module);
  /// Opens a scope and gathers the call's groups, as an operator that uses all of them would. Returns what the modules are to
  /// show, if they do not: without the host lock. If it throws, the module's forward has not been entered.
  std::optional<Shows> enter(RootContext& root, size_t module, bool records_autograd);
  /// Whether the forward that ends now has entered; it has not if its hook, or one in front of it, has thrown.
  bool ends_what_has_entered(RootContext& root, size_t module);
  /// Releases what the pass is over for, and leaves the scope. Returns as `enter`. keeps_post_forward_shard: where parameters
  /// are released, the modules show the shards that stay.
  std::optional<Shows> leave(RootContext& root, bool keeps_post_forward_shard) noexcept;
  /// A root that is around it from now on begins anew.
  void set_has_begun(bool value) { has_begun_.store(value, std::memory_order_relaxed); }

  // --- backward
  /// Tells, inside a backward of one of the call's outputs, that it is the root's. The modules show the unsharded parameters,
  /// as a part of the forward may run again without its hooks. gathers: operators that read them do not reach the root.
  void reach_backward(const std::shared_ptr<RootContext>& root, bool gathers);

  // --- with the root's lock held
  /// Returns what the modules are to show behind `event`, if they do not, or a user has asked for it.
  std::optional<Shows> on(ShowsEvent event);
  /// Lets the view show that.
  void show_behind(ShowsEvent event);
  Shows shows() const { return shows_; }
  bool is_inside() const { return forwards_.is_inside(); }
  /// Forgets the forwards that are under way; returns how many.
  size_t give_up();
  /// Its modules' groups, also those that come later.
  void set_groups(std::vector<std::weak_ptr<ParamGroup>> groups) { groups_ = std::move(groups); }
  /// Null: it is gone.
  std::shared_ptr<View> view() const { return view_.lock(); }

 private:
  using Groups = std::vector<std::shared_ptr<ParamGroup>>;

  Groups live_groups() const;
  PassFacts facts_for(ShowsEvent event) const;

  std::weak_ptr<View> view_;
  std::vector<std::weak_ptr<ParamGroup>> groups_;
  ForwardPasses forwards_;
  std::atomic<Shows> shows_ = Shows::kSharded;  // written under the lock
  std::atomic<bool> has_begun_ = false;
};

}  // namespace fsdp
