"""Process groups of other kinds than gloo's: the fake one, and backends of a user's own."""

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend
from torch.distributed.device_mesh import DeviceMesh

from .common import Model, adam, batches, program, shard, shown, train


def writes_sums(group):
    """The fake group of older torches leaves what reductions are to write as it is: any bits at all."""
    output = torch.full((1,), 7.0)
    dist.reduce_scatter_tensor(output, torch.zeros(dist.get_world_size(group)), group=group)
    return output.item() != 7.0


def trained_over(api, backend, **options):
    """What a model does on a mesh over a new group of that kind. Only sums are the same for all kinds."""
    group = dist.new_group(backend=backend)
    mesh = DeviceMesh.from_group(group, "cpu")
    model = shard(api, Model(), mesh=mesh, **options)
    if not writes_sums(group):
        y = model(batches(1)[0])
        y.sum().backward()
        return {"y": y, "shown": shown(model), "gradients": [p.grad is None for p in model.parameters()]}
    for module in (*model.blocks, model):
        module.set_force_sum_reduction_for_comms(True)
    return {"before": shown(model), "trained": train(model, adam(model), batches(3)), "after": shown(model)}


@program(variants=[(None,), (False,)])
def fake_process_group(api, ranks, reshard):
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  makes the name known

    return trained_over(api, "fake", reshard_after_forward=reshard)


class OwnBackend(Backend):
    """A backend that is derived in Python, where torch knows that (2.15 does); it sends over gloo."""

    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self):
        return "own_backend"

    def all_gather_single(self, output, input, *options):
        return self.gloo._allgather_base(output, input, *options)

    def reduce_scatter_single(self, output, input, *options):
        return self.gloo._reduce_scatter_base(output, input, *options)

    def allreduce(self, tensors, *options):
        return self.gloo.allreduce(tensors, *options)

    def barrier(self, *options):
        return self.gloo.barrier(*options)


def can_be_derived(kind):
    try:
        kind(0, 1)
    except TypeError:
        return False
    return True


dist.Backend.register_backend("own_backend", OwnBackend, devices=["cpu"])


@program
def backend_of_ones_own(api, ranks):
    if not can_be_derived(type("Derived", (Backend,), {})):
        return "not in this torch"
    return trained_over(api, "own_backend")
