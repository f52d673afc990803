#include "fsdp/fully_shard.hpp"

#include "api/shard/controlled_groups.hpp"
#include "base/require.hpp"
#include "comm/comm_memory.hpp"
#include "group/symmetric_memory.hpp"
#include "mesh/separate_group.hpp"
#include "module/handles.hpp"
#include "root/configure.hpp"

// The controls that say through what a group communicates, and in which memory.
namespace fsdp {

namespace {

void check_between_steps(const std::vector<std::shared_ptr<ParamGroup>>& groups, const char* control) {
  for (const auto& group : groups)
    require_state(root_of(*group).is_quiescent(),
                  "{}: '{}' is in the middle of a step; call it before forward or after backward", control,
                  group->name());
}

bool is_own(const Comm* comm) { return comm == nullptr || is_process_group_comm(comm); }

/// What a gather relies on changes while the group is released. change(GroupOptions&) -> void.
template <class Change>
void configure_released(ParamGroup& group, Change&& change) {
  auto& root = root_of(group);
  std::lock_guard lock(root.mutex());
  root.control(group, GroupEvent::kUserReshards);
  configure(group, change);
}

}  // namespace

void FSDPModule::set_custom_all_gather(std::shared_ptr<AllGatherComm> comm, Recurse recurse) {
  const auto groups = controlled_groups(*state_, recurse);
  check_between_steps(groups, "set_custom_all_gather");
  for (const auto& group : groups)
    configure_released(*group, [&](GroupOptions& options) { options.memory.custom_all_gather = comm; });
}

void FSDPModule::set_custom_reduce_scatter(std::shared_ptr<ReduceScatterComm> comm, Recurse recurse) {
  const auto groups = controlled_groups(*state_, recurse);
  check_between_steps(groups, "set_custom_reduce_scatter");
  for (const auto& group : groups)
    configure(*group, [&](GroupOptions& options) { options.reduce.custom_reduce_scatter = comm; });
}

void FSDPModule::set_all_reduce_hook(AllReduceHook hook, Recurse recurse) {
  const auto groups = controlled_groups(*state_, recurse);
  check_between_steps(groups, "set_all_reduce_hook");
  for (const auto& group : groups) configure(*group, [&](GroupOptions& options) { options.reduce.all_reduce_hook = hook; });
}

void FSDPModule::set_allocate_memory_from_process_group_for_comm(bool enable, Recurse recurse) {
  const char* control = "set_allocate_memory_from_process_group_for_comm";
  const auto groups = controlled_groups(*state_, recurse);
  check_between_steps(groups, control);
  for (const auto& group : groups) {
    const auto& gather = group->options().memory.custom_all_gather;
    const auto& reduce = group->options().reduce.custom_reduce_scatter;
    require(is_own(gather.get()) && is_own(reduce.get()),
            "{}: '{}' has a custom {}, which allocates its own buffers; set that to null first", control,
            group->name(), is_own(gather.get()) ? "reduce-scatter" : "all-gather");
  }
  for (const auto& group : groups) {
    const auto& comm = group->identity().mesh_info.shard_group;
    // Where there are slots, parameters are gathered into the backend's memory and need no packing for it.
    const bool has_slots = why_no_slots(*comm).empty();
    const bool packs = enable && !has_slots;
    configure_released(*group, [&](GroupOptions& options) {
      options.memory.custom_all_gather = packs ? process_group_all_gather(comm) : nullptr;
      options.memory.has_symmetric_memory = enable && has_slots;
      options.reduce.custom_reduce_scatter = packs ? process_group_reduce_scatter(comm) : nullptr;
    });
  }
}

void FSDPModule::set_symm_mem_for_comm(const std::string& backend) {
  const auto groups = state_->live_groups();
  if (groups.empty()) return;
  require_state(backend == "NCCL",
                "set_symm_mem_for_comm: expected backend \"NCCL\", the only one there is, found \"{}\"", backend);
  check_between_steps(groups, "set_symm_mem_for_comm");
  for (const auto& group : groups) {
    const auto& gather = group->options().memory.custom_all_gather;
    const auto& reduce = group->options().reduce.custom_reduce_scatter;
    require(!gather && !reduce,
            "set_symm_mem_for_comm: '{}' has a custom {} or memory from the process group, which decides where buffers are; "
            "first set that to null, or set_allocate_memory_from_process_group_for_comm to false",
            group->name(), gather ? "all-gather" : "reduce-scatter");
    const auto& comm = *group->identity().mesh_info.shard_group;
    const std::string why = why_no_slots(comm);
    require_state(why.empty(),
                  "set_symm_mem_for_comm: '{}' communicates over {}, {}; use "
                  "set_allocate_memory_from_process_group_for_comm, or bring your own with set_custom_all_gather",
                  group->name(), comm.backend(), why);
  }
  for (const auto& group : groups)
    configure_released(*group, [](GroupOptions& options) { options.memory.has_symmetric_memory = true; });
}

void FSDPModule::set_reduce_scatter_max_input_buffers(int buffers, Recurse recurse) {
  require(buffers >= 1, "set_reduce_scatter_max_input_buffers: expected 1 buffer or more, found {}", buffers);
  for (const auto& group : controlled_groups(*state_, recurse))
    configure(*group, [&](GroupOptions& options) { options.reduce.max_input_buffers = buffers; });
}

void FSDPModule::set_separate_reduce_scatter_group(bool enable, Recurse recurse) {
  const auto groups = controlled_groups(*state_, recurse);
  check_between_steps(groups, "set_separate_reduce_scatter_group");
  for (const auto& group : groups) {
    const auto& info = group->identity().mesh_info;
    const bool uses = enable && info.shard_size() > 1;
    // Made once, and without the root's lock: all ranks do that together.
    auto separate = group->options().reduce.separate_group;
    if (uses && !separate) separate = separate_group_of(info);
    configure(*group, [&](GroupOptions& options) {
      options.reduce.uses_separate_group = uses;
      options.reduce.separate_group = std::move(separate);
    });
  }
}

void FSDPModule::set_keep_unsharded_storage(bool keep, Recurse recurse) {
  for (const auto& group : controlled_groups(*state_, recurse))
    configure(*group, [&](GroupOptions& options) { options.memory.keeps_unsharded_storage = keep; });
}

void FSDPModule::set_post_optim_event(c10::Event event) {
  auto& context = root_context(*state_, "set_post_optim_event");
  std::lock_guard lock(context.mutex());
  context.runner().comm_ctx().all_gather_stream.wait_for(event);
  if (SideStream::exists_on(event.device()) && context.runner().has_unreleased_groups())
    event.block(current_stream(event.device()));
}

void share_comm_ctx(const std::vector<FSDPModule>& roots) {
  std::vector<std::shared_ptr<ReductionQueue>> queues;
  for (const auto& root : roots) {
    require(root.is_root(), "share_comm_ctx: '{}' is not a root; give the root modules", root.name());
    const auto& context = handles::state(root).context();
    std::shared_ptr<ReductionQueue> queue(context, &context->runner().reductions());  // keeps the root alive
    if (std::find(queues.begin(), queues.end(), queue) == queues.end()) queues.push_back(std::move(queue));
  }
  ReductionQueue::share(queues);
}

}  // namespace fsdp
