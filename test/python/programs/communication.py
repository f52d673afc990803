"""Collectives of the user's own, and hooks on what they leave."""

import torch
import torch.distributed as dist

from shared_mesh import shared_mesh

from .common import Model, adam, batches, error_of, gradients, mesh_of, program, shard, train


class Allocates:
    def __init__(self):
        self.calls = []

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)


class AllGather(Allocates):
    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        self.calls.append(output_tensor.numel() // input_tensor.numel())
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


class ReduceScatter(Allocates):
    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        self.calls.append((output_tensor.numel() * group.size() == input_tensor.numel(), str(output_tensor.dtype)))
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


@program(variants=[(True,), (2,)], tolerance=1e-6)
def custom_all_gather(api, ranks, reshard_after_forward):
    model = shard(api, Model(), mesh=mesh_of(ranks), reshard_after_forward=reshard_after_forward)
    comm = AllGather()
    model.blocks[1].set_custom_all_gather(comm)
    return {"trained": train(model, adam(model), batches(3)), "sizes": sorted(set(comm.calls))}


@program(tolerance=1e-6)
def custom_reduce_scatter(api, ranks):
    model = shard(api, Model(), mesh=mesh_of(ranks))
    comm = ReduceScatter()
    for module in (model, model.blocks[0]):
        module.set_custom_reduce_scatter(comm)
    return {"trained": train(model, adam(model), batches(3)), "calls": comm.calls}


@program(variants=[(1,), (2,)], tolerance=1e-6)
def all_reduce_hook(api, ranks, replicas):
    mesh = shared_mesh(replicas, ranks // replicas, names=("replicate", "shard"))
    model = shard(api, Model(), mesh=mesh if replicas > 1 else mesh_of(ranks))
    seen = []

    def hook(reduced):
        seen.append(str(reduced.dtype))
        reduced.mul_(0.5)

    model.blocks[0].set_all_reduce_hook(hook)
    for x in batches(2):
        model(x).square().mean().backward()
    return {"seen": seen, "gradients": gradients(model)}


@program(ranks=(2,))
def hooks_that_are_refused(api, ranks):
    mesh = shared_mesh(2, 1, names=("replicate", "shard"))
    model = api.fully_shard(Model(), mesh=mesh)
    return error_of(lambda: model.set_all_reduce_hook(lambda reduced: None, stream=object()))
