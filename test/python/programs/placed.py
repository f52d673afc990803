"""Parameters that are DTensors with placements that models seldom have: partial sums, strided cuts, many dimensions."""

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from shared_mesh import shared_mesh

from .common import gradients, program
from .meshes import HAS_DIMS, dims_of, kinds
from .wrong_arguments import kind_of


class Scaled(nn.Module):
    """Computes with the parameter's local tensor: what there is for every placement."""

    def __init__(self, mesh, placements, rows=8):
        super().__init__()
        whole = local = torch.randn(rows, 4)
        for dim, placement in enumerate(placements):
            if isinstance(placement, (Shard, _StridedShard)):
                local = local.chunk(mesh.size(dim), dim=placement.dim)[mesh.get_local_rank(dim)].contiguous()
        self.weight = nn.Parameter(DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape,
                                                      stride=whole.stride()))
        self.is_placed = True

    def forward(self, x):
        # A gradient comes placed as the parameter: FSDP2 makes no partial sums of one that is replicated.
        weight = self.weight.to_local(grad_placements=self.weight.placements if self.is_placed else None)
        return (x[:weight.shape[0], :weight.shape[1]] * weight).square().sum()


def models(mesh, placements):
    return nn.Sequential(Scaled(mesh, placements))


def steps_of(model, steps=3):
    seen = []
    generator = torch.Generator().manual_seed(70 + torch.distributed.get_rank())
    for _ in range(steps):
        x = torch.randn(8, 4, generator=generator)
        loss = model(x)
        loss.backward()
        seen.append([loss.detach(), {name: gradient.to_local().clone() for name, gradient in gradients(model).items()}])
        with torch.no_grad():  # by hand: optimizers' operators know no partial parameters
            for parameter in model.parameters():
                parameter.to_local().sub_(parameter.grad.to_local(), alpha=0.1)
                parameter.grad = None
    return seen


ROWS = {
    "partial": (("tp",), [Partial()]),
    "partial_average": (("tp",), [Partial("avg")]),
    "strided": (("tp",), [_StridedShard(0, split_factor=2)]),
    "strided_columns": (("tp",), [_StridedShard(1, split_factor=2)]),
    "two_cuts": (("ep", "tp"), [Shard(0), Shard(0)]),
    "cut_and_partial": (("ep", "tp"), [Shard(0), Partial()]),
    "strided_and_cut": (("ep", "tp"), [_StridedShard(0, split_factor=2), Shard(0)]),
    "three": (("a", "b", "c"), [Shard(0), Replicate(), Shard(1)]),
}


def shapes_of(names, ranks):
    return (2, *[2 if index == 0 else 1 for index in range(len(names))]) if ranks == 4 else (2, *[1] * len(names))


@program(variants=[(name,) for name in ROWS], tolerance=1e-6)
def placed(api, ranks, row):
    names, placements = ROWS[row]
    mesh = shared_mesh(*shapes_of(names, ranks), names=("dp", *names))
    model = models(mesh[names] if len(names) > 1 else mesh[names[0]], placements)
    before = kinds(model)

    def shard():
        api.fully_shard(model[0], mesh=mesh["dp"])
        api.fully_shard(model, mesh=mesh["dp"])

    error = kind_of(shard)
    if error != "no error":
        return {"error": error, "as_before": kinds(model) == before}
    return {"kinds": kinds(model), "local": model[0].weight.to_local(), "steps": steps_of(model), "after": kinds(model)}


@program(tolerance=1e-6)
def partial_with_a_gradient_that_is_replicated(api, ranks):
    mesh = shared_mesh(*shapes_of(("tp",), ranks), names=("dp", "tp"))
    model = models(mesh["tp"], [Partial()])
    api.fully_shard(model, mesh=mesh["dp"])
    model[0].is_placed = False
    return kind_of(lambda: model(torch.ones(8, 4)).backward())


WHOLE = {
    "partial": (("dp", "tp"), [Replicate(), Partial()]),
    "strided": (("dp", "tp"), [Replicate(), _StridedShard(0, split_factor=2)]),
    "three_beside": (("dp", "a", "b", "c"), [Replicate(), Shard(0), Replicate(), Shard(1)]),
    "four_beside": (("dp", "a", "b", "c", "d"), [Replicate(), Shard(0), Replicate(), Shard(1), Partial()]),
    "between": (("a", "dp", "b", "c"), [Shard(0), Replicate(), Shard(0), Replicate()]),
}


# On five dimensions DTensor weighs an operator's placements for seconds.
@program(ranks=(2, 4) if HAS_DIMS else (), variants=[(name,) for name in WHOLE], long_variants=[("four_beside",)],
         tolerance=1e-6)
def placed_on_the_whole_mesh(api, ranks, row):
    names, placements = WHOLE[row]
    left = {"dp": 2}
    shape = [left.get(name, 1) for name in names]
    if ranks == 4:
        shape[next(index for index, name in enumerate(names) if name != "dp")] = 2
    mesh = shared_mesh(*shape, names=names)
    model = models(mesh, placements)
    options = dict(mesh=mesh, dp_mesh_dims=dims_of(api, shard="dp"))
    before = kinds(model)
    error = kind_of(lambda: (api.fully_shard(model[0], **options), api.fully_shard(model, **options)))
    if error != "no error":
        return {"error": error, "as_before": kinds(model) == before}
    return {"kinds": kinds(model), "local": model[0].weight.to_local(), "steps": steps_of(model), "after": kinds(model)}
