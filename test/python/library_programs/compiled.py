"""torch.compile with what usually stands beside it: activation checkpointing, mixed precision, whole graphs."""

import torch
import torch._dynamo.utils
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from programs.common import Model, adam, batches, mesh_of, shard, train

from .table import program


def counted(trained):
    counters = torch._dynamo.utils.counters
    return {"trained": trained, "graphs": counters["stats"]["unique_graphs"],
            "breaks": sum(counters["graph_break"].values())}


def fresh():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return Model(blocks=2)


@program(ranks=(2,), variants=[(True,), (False,)])
def whole_graphs_in_place(api, ranks, checkpointed):
    """Each block is a compiled module of its own, which must not break, and is sharded."""
    model = fresh()
    for index, block in enumerate(model.blocks):
        inner = checkpoint_wrapper(block) if checkpointed else block
        model.blocks[index] = torch.compile(inner, backend="aot_eager", fullgraph=True)
    policy = api.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard(api, model, mesh=mesh_of(ranks), mp_policy=policy)
    return counted(train(model, adam(model), batches(3), lambda y: y.float().square().mean()))


@program(ranks=(2,))
def compiled_after_sharding(api, ranks):
    model = shard(api, fresh(), mesh=mesh_of(ranks))
    for block in model.blocks:
        block.compile(backend="aot_eager")
    return counted(train(model, adam(model), batches(3)))


@program(ranks=(2,))
def compiled_around_checkpoints(api, ranks):
    model = fresh()
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(block)
    shard(api, model, mesh=mesh_of(ranks))
    model.compile(backend="aot_eager")
    return counted(train(model, adam(model), batches(3)))


@program(ranks=(2,))
def compiled_without_synchronization(api, ranks):
    model = shard(api, fresh(), mesh=mesh_of(ranks), reshard_after_forward=False)
    model.compile(backend="aot_eager")
    optimizer = adam(model)
    for micro, x in enumerate(batches(4)):
        model.set_requires_gradient_sync(micro % 2 == 1)
        model(x).square().mean().backward()
        if micro % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()
    return counted(dict(model.named_parameters()))


@program(ranks=(2,))
def compiled_with_changing_sizes_and_evaluation(api, ranks):
    model = shard(api, fresh(), mesh=mesh_of(ranks))
    called = torch.compile(model, backend="aot_eager")
    optimizer, seen = adam(model), []
    for rows, x in zip((5, 4, 3), batches(3)):
        seen.append(train(called, optimizer, [x[:rows]])["losses"])
        with torch.no_grad():
            seen.append(called(x[:rows]))
    return counted(seen)


def compiled_step_of_the_optimizer(api, ranks):
    model = shard(api, fresh(), mesh=mesh_of(ranks))
    optimizer = adam(model)
    step = torch.compile(optimizer.step, backend="aot_eager")
    for x in batches(3):
        model(x).square().mean().backward()
        step()
        optimizer.zero_grad()
    return counted(dict(model.named_parameters()))


# Gradients of a group share memory; torch 2.11 traces tensors that do only where autograd knows them as views.
if not torch.__version__.startswith("2.11."):
    program(ranks=(2,))(compiled_step_of_the_optimizer)
