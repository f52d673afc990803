#include <torch/csrc/autograd/graph_task.h>

#include <catch2/catch.hpp>

#include <memory>
#include <vector>

#include "module/handles.hpp"
#include "module/state/module_state.hpp"
#include "root/ready_groups.hpp"
#include "support/models.hpp"

// Which groups operators may read without asking their root.

namespace fsdp::test {
namespace {

/// The groups of a chain that is not in a step.
std::vector<std::shared_ptr<ParamGroup>> groups_of(ShardedChain& chain) {
  std::vector<std::shared_ptr<ParamGroup>> groups;
  handles::state(chain.root[0]).visit([&](ModuleState& state) {
    for (auto& group : state.live_groups()) groups.push_back(std::move(group));
  });
  return groups;
}

bool is_ready(const std::shared_ptr<ParamGroup>& group, int64_t task) { return GroupPort::of(*group).is_ready(task); }

}  // namespace

TEST_CASE("the groups of the last use are ready, in its task alone", "[root][ready_groups]") {
  on_ranks(1, [](Rank& rank) {
    ShardedChain chain(rank.mesh(), 3);
    const auto groups = groups_of(chain);
    rank.check(groups.size() >= 3, "three groups or more");
    ReadyGroups ready;
    const std::vector<ParamGroup*> first = {groups[0].get(), groups[1].get()}, second = {groups[1].get(), groups[2].get()};
    ready.set(first, /*task=*/-1);
    rank.check(is_ready(groups[0], -1) && is_ready(groups[1], -1) && !is_ready(groups[2], -1), "the first use");
    rank.check(!is_ready(groups[0], 7), "in another task");
    ready.set(second, /*task=*/7);
    rank.check(!is_ready(groups[0], -1) && is_ready(groups[1], 7) && is_ready(groups[2], 7), "the next use");
    rank.check(!is_ready(groups[1], -1), "no longer in the first task");
    ready.drop(*groups[1]);
    rank.check(!is_ready(groups[1], 7) && is_ready(groups[2], 7), "one was released");
    ready.clear();
    rank.check(!is_ready(groups[2], 7), "a boundary");
  });
}

TEST_CASE("what is written or behind a boundary is not ready", "[root][ready_groups]") {
  on_ranks(2, [](Rank& rank) {
    ShardedChain chain(rank.mesh(), 2);
    const auto groups = groups_of(chain);
    const auto none_is_ready = [&](int64_t task) {
      for (const auto& group : groups)
        if (is_ready(group, task)) return false;
      return true;
    };
    chain.loss(rank.index(), 0);
    rank.check(!none_is_ready(-1), "behind a forward that waits for its backward");
    {
      const torch::NoGradGuard no_grad;
      for (auto& param : chain.model->parameters()) param.mul_(2);
    }
    rank.check(none_is_ready(-1), "written");
    chain.root[0].reset_iter_state();
    int64_t task = -1;
    bool was_ready = false;
    const auto loss = chain.loss(rank.index(), 1);
    // Behind the use of its group in backward, in front of the group's last gradient.
    chain.model->layers[1]->bias.register_hook([&](const at::Tensor&) {
      task = torch::autograd::get_current_graph_task_id();
      was_ready |= !none_is_ready(task);
    });
    loss.backward();
    rank.check(task != -1 && was_ready, "amid the backward");
    rank.check(none_is_ready(-1) && none_is_ready(task), "behind the step");
  });
}

}  // namespace fsdp::test
