"""PyTorch's side of gather_bandwidth: FSDP2 gathers and reduces one group; raw collectives of the same bytes."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import models
import worker


class Group(torch.nn.Module):
    """`matrices` parameters of [dim, dim] and as many of [dim]; its loss costs little more than reading them."""

    def __init__(self, dim, matrices):
        super().__init__()
        self.weights = torch.nn.ParameterList(
            torch.nn.Parameter(torch.ones(sizes)) for sizes in [(dim, dim), (dim,)] * matrices)

    def forward(self):
        return sum(weight.sum() for weight in self.weights)


class Bench:
    def __init__(self, request):
        ranks = dist.get_world_size()
        self.plain = Group(request["dim"], request["matrices"])
        self.sharded = Group(request["dim"], request["matrices"])
        self.bytes = models.parameter_bytes(self.plain)
        fully_shard(self.sharded, mesh=init_device_mesh("cpu", (ranks,)), reshard_after_forward=False)
        self.whole = torch.ones(self.bytes // 4)
        self.piece = torch.ones(self.bytes // 4 // ranks)

    def gather(self):
        begin_together()
        taken = worker.seconds(self.sharded.unshard)
        return taken + worker.seconds(self.sharded.reshard)

    def raw_gather(self):
        begin_together()
        return worker.seconds(lambda: dist.all_gather_into_tensor(self.whole, self.piece))

    def raw_gather_fresh(self):
        """Into memory that no one has touched yet, as every gather does that frees its output."""
        begin_together()
        return worker.seconds(
            lambda: dist.all_gather_into_tensor(torch.empty_like(self.whole), self.piece))

    def raw_reduce(self):
        begin_together()
        return worker.seconds(lambda: dist.reduce_scatter_tensor(self.piece, self.whole))

    def backward(self):
        return time_backward(self.sharded)

    def plain_backward(self):
        return time_backward(self.plain)


def begin_together():
    dist.all_reduce(torch.zeros(1))


def time_backward(module):
    """Seconds of a backward that makes every gradient and, if sharded, reduces them."""
    module.zero_grad(set_to_none=True)
    loss = module()
    begin_together()
    return worker.seconds(loss.backward)


def answer(bench, request):
    measure = getattr(bench, request["do"])
    return {"seconds": [measure() for _ in range(request["times"])]}


if __name__ == "__main__":
    worker.init_gloo()
    worker.serve_one(Bench, lambda bench: {"bytes": bench.bytes}, answer)
