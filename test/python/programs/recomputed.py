"""Activation checkpointing in its other forms; the two plain ones are in around.py."""

import functools

import torch
import torch.nn as nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import (CheckpointPolicy, checkpoint, checkpoint_sequential,
                                    create_selective_checkpoint_contexts)

from .common import Block, Model, adam, batches, gradients, mesh_of, program, shard, train


@program(variants=[("before",), ("after",)])
def composable_checkpoints(api, ranks, when):
    model = Model()
    if when == "before":
        for block in model.blocks:
            composable_checkpoint(block)
    shard(api, model, mesh=mesh_of(ranks))
    if when == "after":
        for block in model.blocks:
            composable_checkpoint(block)
    return train(model, adam(model), batches(3))


@program
def composable_checkpoints_of_a_part(api, ranks):
    model = Model()
    for block in model.blocks:
        composable_checkpoint(block.up)
    shard(api, model, mesh=mesh_of(ranks))
    return train(model, adam(model), batches(2))


@program(variants=[(impl, when) for impl in CheckpointImpl.__members__ for when in ("before", "after")])
def wrapped_checkpoints(api, ranks, impl, when):
    model, mesh = Model(), mesh_of(ranks)
    wrap = functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl[impl])
    for index, block in enumerate(model.blocks):
        if when == "before":
            model.blocks[index] = api.fully_shard(wrap(block), mesh=mesh)
        else:
            model.blocks[index] = wrap(api.fully_shard(block, mesh=mesh))
    api.fully_shard(model, mesh=mesh)
    return {"trained": train(model, adam(model), batches(3)), "names": list(model.state_dict())}


@program(variants=[(True,), (False,)])
def checkpoints_around_several_modules(api, ranks, use_reentrant):
    class InTwo(Model):
        def forward(self, x):
            x = checkpoint_sequential(list(self.blocks), 2, self.enter(x), use_reentrant=use_reentrant)
            return self.head(x) * self.scale

    model = shard(api, InTwo(blocks=4), mesh=mesh_of(ranks))
    return train(model, adam(model), batches(3))


@program
def checkpoints_within_checkpoints(api, ranks):
    class Nested(Model):
        def forward(self, x):
            def blocks(x):
                for block in self.blocks:
                    x = checkpoint(block, x, use_reentrant=False)
                return x

            return self.head(checkpoint(blocks, self.enter(x), use_reentrant=False))

    model = shard(api, Nested(), mesh=mesh_of(ranks))
    return train(model, adam(model), batches(2))


@program
def selective_checkpoints(api, ranks):
    def policy(context, op, *args, **kwargs):
        products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if op in products else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    model = Model()
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(block, context_fn=contexts)
    shard(api, model, mesh=mesh_of(ranks))
    return train(model, adam(model), batches(2))


@program(ranks=(2,))
def checkpoints_with_dropout_and_bfloat16(api, ranks):
    class Drops(Block):
        def forward(self, x):
            return nn.functional.dropout(super().forward(x), 0.5)

    model = Model()
    for index in range(len(model.blocks)):
        model.blocks[index] = checkpoint_wrapper(Drops())
    policy = api.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard(api, model, mesh=mesh_of(ranks), mp_policy=policy)
    torch.manual_seed(7)
    return train(model, adam(model), batches(2), lambda y: y.float().square().mean())


@program
def checkpoints_without_synchronization(api, ranks):
    model = Model()
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(block)
    shard(api, model, mesh=mesh_of(ranks))
    for micro, x in enumerate(batches(3)):
        model.set_requires_gradient_sync(micro == 2)
        model(x).square().mean().backward()
    return gradients(model)
