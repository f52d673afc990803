// What a group takes over of its parameters, without a root: its owner here answers what the group asks.
#include <ATen/ATen.h>

#include <catch2/catch.hpp>
#include <memory>
#include <string>
#include <vector>

#include "dispatch/residency.hpp"
#include "group/param_group.hpp"
#include "param/grad_dtype.hpp"
#include "support/ranks.hpp"

namespace fsdp::test {
namespace {

/// A group that nobody gathers.
class Owner final : public ParamOwner {
 public:
  Owner(const Rank& rank, const std::vector<GroupParam>& params)
      : group_(link_, {.name = "group", .mesh_info = make_mesh_info(rank.mesh(), MeshUse::kShard)}, {.device = at::kCPU},
               params) {}
  ~Owner() override { *link_ = nullptr; }

  ParamGroup& group() { return group_; }

 private:
  void make_resident(std::span<ParamOwner* const>, const OperatorUse&) override {}
  void follow_mode() override {}
  void take_over_requires_grad(size_t) override {}
  void carry_write(size_t) override {}
  bool is_in_scope() const override { return false; }
  void note_write(size_t index) override { group_.changes().note_write(index); }
  std::optional<at::ScalarType> output_dtype(size_t index) const override { return group_.parts().output_dtype(index); }
  const std::string& param_name(size_t index) const override { return group_.params()[index].name(); }
  at::Tensor unsharded_param(size_t index) const override { return group_.params()[index].unsharded_param(); }
  at::Tensor sharded_param(size_t) const override { return {}; }
  const at::TensorImpl* sharded_identity(size_t index) const override { return group_.params()[index].sharded.identity(); }
  void unsharded_storage_gone(size_t index) noexcept override { group_.params()[index].unsharded.storage_gone(); }

  OwnerLink link_ = std::make_shared<ParamOwner*>(this);
  ParamGroup group_;
};

/// One of two parameters, each of 4 by 2 elements, with their tensors.
struct Group {
  explicit Group(const Rank& rank) {
    std::vector<GroupParam> params;
    for (const std::string name : {"p0", "p1"}) {
      unsharded.push_back(at::ones({4, 2}).requires_grad_());
      params.push_back({.name = name, .unsharded_param = unsharded.back(), .param_dtype = at::kFloat});
    }
    owner = std::make_shared<Owner>(rank, params);
    owner->group().attach();
    for (auto& param : owner->group().params()) sharded.push_back(param.sharded.hand_over());
  }
  UserChanges& changes() const { return owner->group().changes(); }
  GroupGradients& gradients() const { return owner->group().gradients(); }
  std::shared_ptr<Owner> owner;
  std::vector<at::Tensor> unsharded, sharded;
};

int64_t version_of(const at::Tensor& tensor) { return static_cast<int64_t>(tensor._version()); }

}  // namespace

TEST_CASE("what was written is stale until a gather shows it, though autograd has been told", "[group][user_changes]") {
  on_ranks(2, [](Rank& rank) {
    const Group group(rank);
    auto& changes = group.changes();
    rank.check(!changes.is_stale(), "a new group shows what it holds");
    rank.check(!changes.refresh_before_gather(), "there is nothing to take over");

    const auto before = version_of(group.unsharded[1]), other = version_of(group.unsharded[0]);
    group.owner->group().params()[1].sharded.bump_version();
    changes.note_write(1);
    rank.check(changes.is_stale(), "written");
    changes.sync_versions();
    rank.check(version_of(group.unsharded[1]) > before, "autograd is told");
    rank.check_equal(version_of(group.unsharded[0]), other, "of what was written alone");
    rank.check(changes.is_stale(), "the values are the old ones still");

    rank.check(changes.refresh_before_gather(), "the gather takes it over");
    rank.check(!changes.is_stale(), "it shows the new values");
    rank.check(!changes.refresh_before_gather(), "once");
  });
}

TEST_CASE("a storage that was replaced goes back with its values, and counts as a write", "[group][user_changes]") {
  on_ranks(2, [](Rank& rank) {
    const Group group(rank);
    auto& changes = group.changes();
    const BelowResidency below;  // past all that would tell of it
    group.sharded[0].set_data(at::full({2, 2}, 7.0));
    changes.validate();
    const auto& piece = group.owner->group().parts().shard.piece(0);
    rank.check(group.sharded[0].const_data_ptr() == piece.const_data_ptr(), "the group's memory");
    rank.check_identical(piece.view(at::kFloat), at::full({4}, 7.0), "the new values");
    rank.check(changes.is_stale(), "written");

    group.sharded[1].set_data(at::ones({3}));
    rank.check_throws<StateError>([&] { changes.validate(); }, {"p1: its sharded parameter was replaced"}, "other sizes");
    rank.check_identical(group.sharded[1].detach(), at::ones({2, 2}), "the old values");
  });
}

TEST_CASE("requires_grad that was set on either tensor holds for both, and is counted", "[group][user_changes]") {
  on_ranks(2, [](Rank& rank) {
    const Group group(rank);
    auto& changes = group.changes();
    rank.check_equal(group.gradients().trainable_count, size_t{2}, "at first");
    group.sharded[0].set_requires_grad(false);
    changes.sync_requires_grad();
    rank.check(!group.unsharded[0].requires_grad(), "from the sharded to the unsharded parameter");
    rank.check_equal(group.gradients().trainable_count, size_t{1}, "one is frozen");
    group.unsharded[1].set_requires_grad(false);
    changes.sync_requires_grad();
    rank.check(!group.sharded[1].requires_grad(), "and back");
    rank.check_equal(group.gradients().trainable_count, size_t{0}, "both are frozen");
  });
}

TEST_CASE("a grad_dtype is taken over where that is asked for, not with a look at values", "[group][user_changes]") {
  on_ranks(2, [](Rank& rank) {
    const Group group(rank);
    auto& changes = group.changes();
    const auto wanted = GradDtype{.is_set = true, .dtype = at::kBFloat16};
    set_grad_dtype(group.sharded[0], wanted);
    changes.validate();
    rank.check(group.gradients().dtypes.kept_dtype(0) == at::kFloat, "values were looked at");
    changes.sync_grad_dtypes();
    rank.check(group.gradients().dtypes.kept_dtype(0) == at::kBFloat16, "it was asked for");
    rank.check(group.gradients().dtypes.reduce_dtype(0) == at::kBFloat16, "the reduction follows");
  });
}

}  // namespace fsdp::test
