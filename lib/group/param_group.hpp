#pragma once

#include <string>
#include <utility>
#include <vector>

#include "group/gather/unsharder.hpp"
#include "group/group_options.hpp"
#include "group/group_parts.hpp"
#include "group/notes/group_notes.hpp"
#include "group/reduce/group_gradients.hpp"
#include "group/edit/tied_params.hpp"
#include "group/user_changes.hpp"

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

  /// Says where its module stands in the tree, and what group and parameters are called there, one name for each parameter.
  void place(TreeInterval tree, std::string name, std::vector<std::string> params);
  /// Turns the tensors into unsharded parameters. Does not fail halfway: all allocations come before.
  void attach();
  /// Parameters that other groups hold until then: whoever attaches it takes them over first.
  std::vector<TiedParam>& tied() { return tied_; }

  GroupParts& parts() { return parts_; }
  const GroupParts& parts() const { return parts_; }
  const std::string& name() const { return parts_.identity.name; }
  const GroupIdentity& identity() const { return parts_.identity; }
  std::vector<FSDPParam>& params() { return parts_.params; }
  const std::vector<FSDPParam>& params() const { return parts_.params; }

  Unsharder& unsharder() { return unsharder_; }
  const Unsharder& unsharder() const { return unsharder_; }
  GroupGradients& gradients() { return gradients_; }
  const GroupGradients& gradients() const { return gradients_; }
  UserChanges& changes() { return changes_; }
  GroupNotes& notes() { return notes_; }

  const GroupOptions& options() const { return options_; }
  /// Does what follows, too; but its root is to tell the scheduler (root/configure.hpp). If it throws, nothing has changed.
  void set_options(GroupOptions options);

 private:
  GroupParts parts_;
  std::vector<TiedParam> tied_;  // until attach
  GroupOptions options_;
  LeftStorages::Closes closes_left_ = LeftStorages::Closes::kNever;
  Unsharder unsharder_;
  GroupGradients gradients_;
  GroupNotes notes_;
  UserChanges changes_;
};

}  // namespace fsdp
