#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "api/shard/controlled_groups.hpp"
#include "base/require.hpp"
#include "comm/watch/awaited_collectives.hpp"
#include "root/root_context.hpp"

// Which ReduceScatterStart takes the least time: measured, and the same on all ranks.
namespace fsdp {
namespace {

/// Of all groups of ranks that the root communicates over. A maximum over each in turn is that over all their ranks.
std::vector<std::shared_ptr<Communicator>> communicators_of(RootContext& context) {
  std::vector<std::shared_ptr<Communicator>> known;
  for (const auto* group : context.runner().groups()) {
    const auto& info = group->identity().mesh_info;
    for (const auto& comm : {info.shard_group, info.replicate_group})
      if (comm && comm->size() > 1 && std::find(known.begin(), known.end(), comm) == known.end()) known.push_back(comm);
  }
  return known;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t count = values.size();
  return (values[(count - 1) / 2] + values[count / 2]) / 2;
}

/// The times of the slowest ranks.
std::vector<double> over_ranks(std::vector<double> times, RootContext& context) {
  const auto device = context.runner().groups().front()->identity().mesh_info.mesh.device();
  const auto most = at::tensor(times, at::kDouble).to(device);
  for (const auto& comm : communicators_of(context))
    awaited::all_reduce(*comm, most, ReduceOp::kMax, "choose_reduce_scatter_start");
  const auto here = most.cpu();
  return {here.const_data_ptr<double>(), here.const_data_ptr<double>() + here.numel()};
}

}  // namespace

ReduceScatterStart FSDPModule::choose_reduce_scatter_start(const std::function<double()>& time_step, int rounds) {
  require(time_step != nullptr, "choose_reduce_scatter_start: expected a function that runs a step and returns its time");
  require(rounds >= 1, "choose_reduce_scatter_start: expected 1 round or more, found {}", rounds);
  auto& context = root_context(*state_, "choose_reduce_scatter_start");
  require_state(context.is_quiescent(), "choose_reduce_scatter_start: cannot be called inside a step; call it between steps");
  const auto before = context.options().schedule.reduce_scatter_start;
  if (communicators_of(context).empty()) return before;
  require_state(std::any_of(context.runner().groups().begin(), context.runner().groups().end(),
                            [](const auto* group) { return group->options().reduce.uses_separate_group; }),
                "choose_reduce_scatter_start: no module reduces over a process group of its own, so all choices are the same; "
                "call set_separate_reduce_scatter_group first");
  std::array<std::vector<double>, kReduceScatterStarts.size()> times;
  try {
    for (int i = 0; i < 2; ++i) time_step();  // the first may learn the order, the second is the first to follow it
    for (int round = 0; round < rounds; ++round)
      for (size_t i = 0; i < kReduceScatterStarts.size(); ++i) {
        set_reduce_scatter_start(kReduceScatterStarts[i]);
        const double time = time_step();
        times[i].push_back(std::isfinite(time) ? time : std::numeric_limits<double>::infinity());
      }
  } catch (...) {
    set_reduce_scatter_start(before);
    throw;
  }
  set_reduce_scatter_start(before);
  std::vector<double> medians;
  for (const auto& of_choice : times) medians.push_back(median(of_choice));
  medians = over_ranks(std::move(medians), context);
  const auto least = std::min_element(medians.begin(), medians.end());
  // Of all ranks' times, so they all throw.
  require(std::isfinite(*least),
          "choose_reduce_scatter_start: time_step returned no finite time for any choice; it must return the time of the step "
          "that it has run");
  const auto chosen = kReduceScatterStarts[static_cast<size_t>(least - medians.begin())];
  set_reduce_scatter_start(chosen);
  return chosen;
}

}  // namespace fsdp
