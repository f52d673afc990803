"""Meshes of several dimensions: tensor parallelism, dp_mesh_dims, parameters on a mesh of their own."""

import torch
import torch.distributed.fsdp
import torch.nn as nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from shared_mesh import shared_mesh

from .common import adam, error_of, full, gradients, program, sgd, shown, train

try:
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult
except ImportError:
    ShardPlacementResult = None
HAS_DIMS = hasattr(torch.distributed.fsdp, "DataParallelMeshDims")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


# Rows are spread over the tensor-parallel ranks outside `up` and `down`, so a norm's gradient is a partial sum.
PLAN = {"norm": SequenceParallel(sequence_dim=0, use_local_output=True),
        "up": ColwiseParallel(input_layouts=Shard(0)),
        "down": RowwiseParallel(output_layouts=Shard(0))}


def parallel_model(mesh, blocks=2):
    model = nn.Sequential(*(Block() for _ in range(blocks)))
    for block in model:
        parallelize_module(block, mesh, PLAN)
    return model


def shard_blocks(api, model, **options):
    for block in model:
        api.fully_shard(block, **options)
    return api.fully_shard(model, **options)


def rows(steps, dtype=torch.float32):
    generator = torch.Generator().manual_seed(50 + torch.distributed.get_rank())
    return [torch.randn(4, 8, generator=generator, dtype=dtype) for _ in range(steps)]


def mesh_2d(ranks, data):
    return shared_mesh(data, ranks // data, names=("dp", "tp"))


def kinds(model):
    """What the modules hold at the moment."""
    return [(name, type(parameter).__name__, str(getattr(parameter, "placements", "")),
             str(getattr(parameter, "device_mesh", "")), isinstance(parameter, nn.Parameter))
            for name, parameter in model.named_parameters()]


@program(variants=[(1,), (2,), (4,)], tolerance=1e-6)
def tensor_parallel(api, ranks, data):
    if data > ranks:
        return None
    mesh = mesh_2d(ranks, data)
    model = shard_blocks(api, parallel_model(mesh["tp"]), mesh=mesh["dp"])
    inside = []
    model[0].up.register_forward_pre_hook(lambda module, args: inside.extend(kinds(module)))
    before = kinds(model)
    trained = train(model, adam(model), rows(3), max_norm=0.5)
    return {"before": before, "inside": inside, "trained": trained, "after": kinds(model),
            "whole": {name: full(parameter) for name, parameter in model.named_parameters()}}


# DTensor takes half a second of a processor to plan an operator on three dimensions that it has not seen there before.
@program(ranks=(4,), variants=[((2, 1, 2), "adam_and_clipping"), ((1, 2, 2), "sgd"), ((1, 2, 2), "adam_and_clipping")],
         long_variants=[((1, 2, 2), "adam_and_clipping")], tolerance=1e-6)
def tensor_parallel_in_replicas(api, ranks, shape, step):
    mesh = shared_mesh(*shape, names=("replicate", "shard", "tp"))
    model = shard_blocks(api, parallel_model(mesh["tp"]), mesh=mesh["replicate", "shard"])
    optimizer, max_norm = (sgd(model), None) if step == "sgd" else (adam(model), 0.5)
    return {"before": kinds(model), "trained": train(model, optimizer, rows(3), max_norm=max_norm)}


@program(ranks=(4,), tolerance=1e-6)
def tensor_parallel_beside_plain_parameters(api, ranks):
    mesh = mesh_2d(ranks, 2)
    model = nn.Sequential(Block(), nn.Linear(8, 5))
    parallelize_module(model[0], mesh["tp"], PLAN)
    shard_blocks(api, model, mesh=mesh["dp"])
    return {"before": kinds(model), "trained": train(model, torch.optim.SGD(model.parameters(), lr=0.1), rows(3))}


@program(ranks=(4,), tolerance=1e-6)
def tensor_parallel_with_accumulation(api, ranks):
    mesh = mesh_2d(ranks, 2)
    model = shard_blocks(api, parallel_model(mesh["tp"]), mesh=mesh["dp"])
    seen = []
    for step, x in enumerate(rows(4)):
        model.set_requires_gradient_sync(step % 2 == 1)
        model(x).square().mean().backward()
        seen.append([parameter.grad is None for parameter in model.parameters()])
    return {"seen": seen, "gradients": gradients(model)}


@program(ranks=(4,), tolerance=1e-2)
def tensor_parallel_in_bfloat16(api, ranks):
    mesh = mesh_2d(ranks, 2)
    policy = api.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = shard_blocks(api, parallel_model(mesh["tp"]), mesh=mesh["dp"], mp_policy=policy)
    return {"trained": train(model, adam(model), rows(3), lambda y: y.float().square().mean()), "after": kinds(model)}


@program(ranks=(4,), tolerance=1e-6)
def tensor_parallel_frozen_in_part(api, ranks):
    mesh = mesh_2d(ranks, 2)
    model = parallel_model(mesh["tp"])
    model[0].up.weight.requires_grad_(False)
    model[1].norm.requires_grad_(False)
    shard_blocks(api, model, mesh=mesh["dp"])
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    first = train(model, optimizer, rows(2))
    model[0].up.weight.requires_grad_(True)
    model[0].down.weight.requires_grad_(False)
    return {"first": first, "second": train(model, optimizer, rows(2)), "after": shown(model)}


@program(ranks=(4,), tolerance=1e-6)
def tensor_parallel_state_dict(api, ranks):
    mesh = mesh_2d(ranks, 2)
    model = shard_blocks(api, parallel_model(mesh["tp"]), mesh=mesh["dp"])
    train(model, adam(model), rows(1))
    other = shard_blocks(api, parallel_model(mesh["tp"]), mesh=mesh["dp"])
    other.load_state_dict(model.state_dict())
    return {"state": model.state_dict(), "trained": train(other, adam(other), rows(2))}


@program(ranks=(4,), tolerance=1e-6)
def tensor_parallel_built_on_meta(api, ranks):
    mesh = mesh_2d(ranks, 2)
    with torch.device("meta"):
        model = parallel_model(mesh["tp"])
    shard_blocks(api, model, mesh=mesh["dp"])
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.copy_(torch.ones_like(parameter) * 0.1)
    return train(model, adam(model), rows(2))


@program(ranks=(4,), tolerance=1e-6)
def tensor_parallel_recomputed(api, ranks):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    mesh = mesh_2d(ranks, 2)
    model = parallel_model(mesh["tp"])
    for index in range(len(model)):
        model[index] = checkpoint_wrapper(model[index])
    shard_blocks(api, model, mesh=mesh["dp"])
    return train(model, adam(model), rows(3))


@program(ranks=(2, 4), tolerance=1e-6)
def meshes_without_a_common_root(api, ranks):
    # Each rank's model is one of its own.
    model = parallel_model(shared_mesh(ranks, names=("tp",)))
    mesh = shared_mesh(ranks, names=("dp",))
    before = kinds(model)
    error = error_of(lambda: api.fully_shard(model, mesh=mesh))
    return {"error": error != "no error", "unchanged": before == kinds(model)}


def dims_of(api, **dims):
    return api.DataParallelMeshDims(**dims)


def whole_mesh_model(mesh, model, placements_of):
    """All parameters as DTensors on the whole mesh."""
    def partition(name, module, device_mesh):
        for key, parameter in list(module.named_parameters(recurse=False)):
            placements = placements_of(f"{name}.{key}", parameter)
            module.register_parameter(key, nn.Parameter(distribute_tensor(parameter.detach(), device_mesh, placements)))

    return distribute_module(model, mesh, partition)


def tensor_parallel_over(mesh):
    """A model cut over the dimension "tp", if there is one, and replicated over the others."""
    names = mesh.mesh_dim_names

    def placements_of(key, parameter):
        cut = {"0.weight": Shard(0), "0.bias": Shard(0), "2.weight": Shard(1)}.get(key, Replicate())
        return [cut if each == "tp" else Replicate() for each in names]

    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    return whole_mesh_model(mesh, model, placements_of)


def batches_over(mesh, steps):
    """This rank's rows of each step, as DTensors. The ranks of tensor parallelism have the same rows."""
    names = mesh.mesh_dim_names
    for x in rows(steps):
        if "tp" in names:
            torch.distributed.broadcast(x, group=mesh["tp"].get_group(), group_src=0)
        yield DTensor.from_local(x, mesh, [Replicate() if each == "tp" else Shard(0) for each in names])


SPMD = {
    "fsdp": (("dp", "tp"), (2, 2), dict(shard="dp")),
    "hsdp": (("replicate", "dp", "tp"), (2, 1, 2), dict(shard="dp", replicate="replicate")),
    "tp_first": (("tp", "dp"), (2, 2), dict(shard="dp")),
    "two_shard": (("dp", "cp"), (2, 2), dict(shard=("dp", "cp"))),
    "two_shard_beside_tp": (("dp", "cp", "tp"), (2, 2, 1), dict(shard=("dp", "cp"))),
    "replicas": (("replicas", "tp"), (2, 2), dict(replicate="replicas")),
}


@program(ranks=(4,) if HAS_DIMS else (), variants=[(name,) for name in SPMD],
         long_variants=[("two_shard_beside_tp",)], tolerance=1e-6)
def whole_mesh_with_named_dims(api, ranks, name):
    names, shape, dims = SPMD[name]
    mesh = shared_mesh(*shape, names=names)
    model = tensor_parallel_over(mesh)
    options = dict(mesh=mesh, dp_mesh_dims=dims_of(api, **dims))
    api.fully_shard(model[2], **options)
    api.fully_shard(model, **options)

    losses, optimizer = [], torch.optim.SGD(model.parameters(), lr=0.1)
    for x in batches_over(mesh, 3):
        y = model(x)
        loss = y.square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.full_tensor().detach())
        last = gradients(model)
        optimizer.zero_grad()
    return {"kinds": kinds(model), "losses": losses, "gradients": last,
            "weights": {key: full(parameter) for key, parameter in model.named_parameters()}}


@program(ranks=(4,) if HAS_DIMS else ())
def wrong_named_dims(api, ranks):
    mesh = shared_mesh(2, 2, names=("data", "tp"))
    other = shared_mesh(4, names=("data",))
    unnamed = shared_mesh(4)

    def on_mesh(*placements):
        return whole_mesh_model(mesh, nn.Sequential(nn.Linear(8, 8)), lambda *_: placements)

    def attempt(model, mesh, name):
        before = kinds(model)
        error = error_of(lambda: api.fully_shard(model, mesh=mesh, dp_mesh_dims=dims_of(api, shard=name)))
        return error, before == kinds(model)

    return [
        error_of(lambda: dims_of(api)),
        attempt(nn.Linear(8, 8), mesh, "data"),
        attempt(on_mesh(Replicate(), Replicate()), mesh, "nobody"),
        attempt(on_mesh(Shard(0), Replicate()), mesh, "data"),
        attempt(on_mesh(Replicate(), Replicate()), other, "data"),
        attempt(on_mesh(Replicate(), Replicate()), unnamed, "data"),
    ]


class Experts(nn.Module):
    """Each of two expert-parallel ranks has its own; for the test they see all rows."""

    def __init__(self, rank):
        super().__init__()
        self.router = nn.Linear(8, 8)
        self.expert = nn.Linear(8, 8)
        with torch.no_grad():
            self.expert.weight.mul_(1 + rank)

    def forward(self, x):
        return x + self.expert(torch.relu(self.router(x)))


@program(ranks=(2,) if ShardPlacementResult else ())
def one_result_changed_for_each_parameter(api, ranks):
    mesh = shared_mesh(ranks, names=("dp",))
    result = ShardPlacementResult(None, FSDPMeshInfo(mesh, shard_mesh_dim=0))

    def place(parameter):
        result.placement = Shard(parameter.dim() - 1)
        return result

    model = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 8))
    api.fully_shard(model, mesh=mesh, shard_placement_fn=place)
    return {"before": kinds(model), "trained": train(model, torch.optim.SGD(model.parameters(), lr=0.1), rows(3))}


@program(ranks=(4,) if ShardPlacementResult else (), variants=[("sharded",), ("replicated",)])
def parameters_on_another_mesh(api, ranks, experts):
    whole = shared_mesh(ranks, names=("dp",))
    expert = shared_mesh(2, 2, names=("edp", "ep"))
    own = (FSDPMeshInfo(expert["edp"], shard_mesh_dim=0) if experts == "sharded" else
           HSDPMeshInfo(expert, shard_mesh_dim=1, replicate_mesh_dim=0))
    model = nn.Sequential(*(Experts(expert.get_local_rank("ep")) for _ in range(2)))
    theirs = {parameter for block in model for parameter in block.expert.parameters()}

    def place(parameter):
        return ShardPlacementResult(Shard(0), own) if parameter in theirs else None

    for block in model:
        api.fully_shard(block, mesh=whole, shard_placement_fn=place)
    api.fully_shard(model, mesh=whole)
    return {"before": kinds(model), "trained": train(model, torch.optim.SGD(model.parameters(), lr=0.1), rows(3))}
