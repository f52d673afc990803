"""Collectives of the user's own, and hooks on what they leave."""

import contextlib
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory
from torch.distributed.fsdp._fully_shard import _fsdp_collectives

from shared_mesh import shared_mesh

from .common import Model, adam, batches, error_of, gradients, mesh_of, program, shard, train


HAS_SYMMETRIC_MEMORY = hasattr(_fsdp_collectives, "SymmMemReduceScatter")


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


class SymmetricMemory:
    """Stands in for torch's, which needs GPUs: buffers are ordinary ones, and what it is asked for is written down."""

    def __init__(self):
        self.backends, self.met = set(), set()

    def __enter__(self):
        symmetric, self.patches = torch.distributed._symmetric_memory, contextlib.ExitStack()
        for owner, name, stand_in in (
                (symmetric, "set_backend", self.backends.add), (symmetric, "get_mem_pool", lambda device: None),
                (symmetric, "rendezvous", self.rendezvous), (torch.cpu, "use_mem_pool", contextlib.nullcontext)):
            self.patches.enter_context(mock.patch.object(owner, name, stand_in, create=True))
        return self

    def __exit__(self, *_):
        self.patches.close()

    def rendezvous(self, tensor, group):
        self.met.add((tensor.is_contiguous(), len(group) > 0))


def set_symmetric(model):
    for module in (model, *model.blocks):
        module.set_symm_mem_for_comm()


@program(variants=[(False,), (True,)] if HAS_SYMMETRIC_MEMORY else [], tolerance=1e-6)
def symmetric_memory(api, ranks, only_sums):
    model = shard(api, Model(), mesh=mesh_of(ranks))
    with SymmetricMemory() as memory:
        if only_sums:
            model.set_force_sum_reduction_for_comms(True)
            model.blocks[0].set_force_sum_reduction_for_comms(True)
        set_symmetric(model)
        set_symmetric(model)
        trained = train(model, adam(model), batches(3))
    return {"trained": trained, "backends": memory.backends, "met": sorted(memory.met)}


@program(ranks=(2,), variants=[()] if HAS_SYMMETRIC_MEMORY else [])
def symmetric_memory_that_is_refused(api, ranks):
    def sharded(only_sums=False):
        model = api.fully_shard(torch.nn.Linear(4, 4), mesh=mesh_of(ranks))
        model.set_force_sum_reduction_for_comms(only_sums)
        return model

    def two_buffers(first, second):
        model = sharded(only_sums=True)
        for change in (first, second):
            change(model)
        model(torch.ones(2, 4)).sum().backward()

    custom, own, twice = sharded(), sharded(), sharded()
    custom.set_custom_reduce_scatter(ReduceScatter())
    own.set_allocate_memory_from_process_group_for_comm(True)
    with SymmetricMemory():
        twice.set_symm_mem_for_comm()
        memory, buffers = (lambda model: model.set_symm_mem_for_comm()), (
            lambda model: model.set_reduce_scatter_max_input_buffers(2))
        return [error_of(custom.set_symm_mem_for_comm), error_of(own.set_symm_mem_for_comm),
                error_of(lambda: twice.set_allocate_memory_from_process_group_for_comm(True)),
                *([error_of(lambda: two_buffers(memory, buffers)), error_of(lambda: two_buffers(buffers, memory))]
                  if hasattr(own, "set_reduce_scatter_max_input_buffers") else [])]


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
