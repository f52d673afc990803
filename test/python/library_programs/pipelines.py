"""torch.distributed.pipelining with sharded stages."""

import functools

import torch
import torch.distributed.fsdp
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import (PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B,
                                          ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble)

from programs.common import (EPS, WIDTH, Block, Model, adam, batches, error_of, gradients, mesh_of, shard, shown, train,
                             weights)

from .table import program

STAGES, MICROBATCHES, ROWS = 2, 4, 2


class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def stages_of(api, mesh, per_rank, folded):
    """This rank's: one, or two that lie apart, or the first and the last ("folded")."""
    here, count = mesh.get_local_rank("pp"), STAGES * per_rank
    mine = [here, count - 1 - here] if folded else [here + STAGES * index for index in range(per_rank)]
    made = []
    for index in mine:
        torch.manual_seed(index)
        module = Stage()
        for block in module.blocks:
            api.fully_shard(block, mesh=mesh["dp"])
        api.fully_shard(module, mesh=mesh["dp"])
        made.append(PipelineStage(module, index, count, torch.device("cpu"), group=mesh.get_group("pp")))
    return made


SCHEDULES = {
    "gpipe": (ScheduleGPipe, 1, False),
    "1f1b": (Schedule1F1B, 1, False),
    "interleaved": (ScheduleInterleaved1F1B, 2, False),
    "interleaved_zero_bubble": (ScheduleInterleavedZeroBubble, 2, False),
}
# Over gloo it does not get through its first exchange in torch 2.11.
if hasattr(torch.distributed.fsdp.FSDPModule, "finalize_backward"):
    SCHEDULES["zbv"] = (ScheduleZBVZeroBubble, 2, True)
    # Compares the stages' communication contexts.
    SCHEDULES["deferred"] = (functools.partial(ScheduleInterleaved1F1B, defer_reduce_grad_wait=True), 2, False)


@program(variants=[(name,) for name in SCHEDULES])
def pipeline(api, ranks, name):
    kind, per_rank, folded = SCHEDULES[name]
    mesh = init_device_mesh("cpu", (STAGES, ranks // STAGES), mesh_dim_names=("pp", "dp"))
    stages = stages_of(api, mesh, per_rank, folded)
    schedule = kind(stages if per_rank > 1 else stages[0], MICROBATCHES,
                    loss_fn=lambda y, target: (y - target).square().mean())
    optimizer = torch.optim.AdamW([p for stage in stages for p in stage.submod.parameters()], lr=1e-2, eps=EPS)
    generator = torch.Generator().manual_seed(mesh.get_local_rank("dp"))
    losses = []
    for _ in range(2):
        x, target = torch.randn(2, MICROBATCHES * ROWS, WIDTH, generator=generator)
        inputs = (x,) if any(stage.is_first for stage in stages) else ()
        last = any(stage.is_last for stage in stages)
        schedule.step(*inputs, target=target if last else None, losses=losses if last else None)
        optimizer.step()
        seen = [gradients(stage.submod) for stage in stages]
        optimizer.zero_grad()
    return {"losses": [loss.detach() for loss in losses], "gradients": seen,
            "weights": [weights(stage.submod) for stage in stages],
            "after": [shown(stage.submod) for stage in stages]}


@program
def backwards_ended_through_the_state(api, ranks):
    """As torch.distributed.pipelining does it before torch 2.15."""
    model = shard(api, Model(), mesh=mesh_of(ranks))
    optimizer, seen = adam(model), []
    for _ in range(2):
        for x in batches(3):
            model.set_is_last_backward(False)
            model.set_reshard_after_backward(False)
            model.set_requires_gradient_sync(False)
            model(x).square().mean().backward()
        model.set_is_last_backward(True)
        model.set_reshard_after_backward(True)
        model.set_requires_gradient_sync(True)
        root = torch.distributed.fsdp.fully_shard.state(model)
        for state in root._state_ctx.all_states:
            for group in getattr(state, "_fsdp_param_groups", None) or filter(None, [state._fsdp_param_group]):
                group.post_backward()
        root._root_post_backward_final_callback()
        seen += [shown(model), gradients(model)]
        optimizer.step()
        optimizer.zero_grad()
    return {"seen": seen, "after": train(model, optimizer, batches(1))}


@program
def communication_contexts(api, ranks):
    if not hasattr(torch.distributed.fsdp, "share_comm_ctx"):
        return "not in this torch"
    stages = [shard(api, Model(), mesh=mesh_of(ranks)) for _ in range(3)]
    api.share_comm_ctx(stages[:2])
    return [len({id(stage._get_fsdp_state()._comm_ctx) for stage in some}) for some in (stages[:2], stages[1:])]


@program
def other_composable_functions(api, ranks):
    from torch.distributed._composable.replicate import replicate
    from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_with_fsdp

    model = shard(api, Model(), mesh=mesh_of(ranks))
    return [error_of(lambda: replicate(model)), error_of(lambda: replicate_with_fsdp(model, mesh=mesh_of(ranks))),
            error_of(lambda: torch.distributed.fsdp.fully_shard(model, mesh=mesh_of(ranks))),
            isinstance(model, torch.distributed.fsdp.FSDPModule),
            [isinstance(module, api.FSDPModule) for module in model.modules()]]
