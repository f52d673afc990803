"""Plain parameters annotated by the package spmd_types, with dp_mesh_dims."""

import contextlib
import copy

import torch
import torch.distributed.fsdp
import torch.nn as nn

import fsdp
from shared_mesh import shared_mesh

from .common import adam, error_of, full, gradients, program, shown, train

HAS_DIMS = hasattr(torch.distributed.fsdp, "DataParallelMeshDims")
NEEDS = ("spmd_types",)
PAIR = (2,) if HAS_DIMS else ()
WIDTH = 8


class Block(nn.Module):
    """Of tensor parallelism, if there is any, written with spmd_types' own collectives: rows are spread over its ranks in
    `norm`, whose gradient is a partial sum there, and whole in `up` and `down`, which are cut."""

    def __init__(self, tensor=None):
        super().__init__()
        self.group = (lambda: tensor.get_group()) if tensor else None  # a function, which deepcopy leaves
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        import spmd_types as spmd

        y = self.norm(x)
        if self.group is not None:
            y = spmd.redistribute(y, self.group(), src=spmd.S(0), dst=spmd.R, backward_options={"op_dtype": y.dtype})
        y = self.down(torch.relu(self.up(y)))
        if self.group is not None:
            y = spmd.redistribute(y, self.group(), src=spmd.P, dst=spmd.S(0), op_dtype=y.dtype)
        return x + y


def cut(parameter, dim, mesh):
    return nn.Parameter(parameter.detach().chunk(mesh.size(), dim)[mesh.get_local_rank()].clone())


def annotated(mesh, blocks=2, is_whole=True):
    """is_whole: the data-parallel dimensions are written down, too."""
    import spmd_types as spmd

    tensor = mesh["tp"] if "tp" in mesh.mesh_dim_names else None
    data = {mesh.get_group(name): spmd.R for name in mesh.mesh_dim_names if name != "tp"} if is_whole else {}
    model = nn.Sequential(*(Block(tensor) for _ in range(blocks)))
    for block in model:
        dims = {}
        if tensor:
            for layer, dim in ((block.up, 0), (block.down, 1)):
                layer.weight = cut(layer.weight, dim, tensor)
            block.up.bias = cut(block.up.bias, 0, tensor)
            dims = {block.up.weight: 0, block.up.bias: 0, block.down.weight: 1}
        with typechecking(mesh):
            for parameter in block.parameters():
                own = {} if tensor is None else {
                    tensor.get_group(): spmd.S(dims[parameter]) if parameter in dims else spmd.R}
                spmd.assert_type(parameter, {**data, **own})
    return model


@contextlib.contextmanager
def typechecking(mesh):
    import spmd_types as spmd
    from spmd_types.checker import typecheck

    with spmd.set_current_mesh(mesh), typecheck():
        yield


def inputs(mesh, steps):
    """Rows of their own on each rank, annotated as such."""
    import spmd_types as spmd

    generator = torch.Generator().manual_seed(60 + torch.distributed.get_rank())
    made = [torch.randn(4, WIDTH, generator=generator) for _ in range(steps)]
    with typechecking(mesh):
        for each in made:
            spmd.assert_type(each, {mesh.get_group(name): spmd.V for name in mesh.mesh_dim_names})
    return made


def shard(api, model, mesh, dims, **options):
    options = dict(mesh=mesh, dp_mesh_dims=api.DataParallelMeshDims(**dims), **options)
    for block in model:
        api.fully_shard(block, **options)
    return api.fully_shard(model, **options)


def types_of(model):
    """What modules hold, and as what it is annotated."""
    import spmd_types as spmd

    return [(name, type(each).__name__, str(getattr(each, "placements", "")),
             {} if hasattr(each, "placements") else {str(axis): str(kind) for axis, kind in spmd.get_local_type(each).items()},
             str(None if hasattr(each, "placements") else spmd.get_partition_spec(each)))
            for name, each in model.named_parameters()]


MESHES = {
    "data": (("dp",), (2,), dict(shard="dp")),
    "replicas": (("dp",), (2,), dict(replicate="dp")),
    "tensor": (("dp", "tp"), (1, 2), dict(shard="dp")),
    "two_shard": (("dp", "cp"), (2, 1), dict(shard=("dp", "cp"))),
    "hsdp": (("replicate", "dp"), (2, 1), dict(shard="dp", replicate="replicate")),
}


def mesh_named(name):
    names, shape, dims = {**MESHES, **ON_FOUR}[name]
    return shared_mesh(*shape, names=names), dims


# Not ("tp", "dp"): FSDP2 reads placements in another order than the mesh's there, and refuses.
ON_FOUR = {"data_and_tensor": (("dp", "tp"), (2, 2), dict(shard="dp"))}


@program(ranks=(4,) if HAS_DIMS else (), needs=NEEDS, variants=[(name,) for name in ON_FOUR], tolerance=1e-6)
@program(ranks=PAIR, needs=NEEDS, variants=[(name,) for name in MESHES])
def annotated_parameters(api, ranks, name):
    mesh, dims = mesh_named(name)
    model = shard(api, annotated(mesh), mesh, dims)
    before, inside = types_of(model), []
    model[0].up.register_forward_pre_hook(lambda module, args: inside.extend(types_of(model[0])))
    optimizer, losses = adam(model), []
    for x in inputs(mesh, 3):
        with typechecking(mesh):
            y = model(x)
        loss = y.square().mean()
        loss.backward()
        last = gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return {"before": before, "inside": inside, "losses": losses, "gradients": last, "after": shown(model),
            "whole": {key: full(parameter) for key, parameter in model.named_parameters()}}


@program(ranks=PAIR, needs=NEEDS, variants=[("data",), ("tensor",)])
def annotated_in_bfloat16(api, ranks, name):
    mesh, dims = mesh_named(name)
    model = annotated(mesh)
    shard(api, model, mesh, dims, mp_policy=api.MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    seen = []
    model[0].norm.register_forward_pre_hook(lambda module, args: seen.extend([args[0].dtype, str(kinds_of(args[0]))]))
    for x in inputs(mesh, 2):
        with typechecking(mesh):
            y = model(x)
        y.float().square().mean().backward()
    return {"seen": seen, "gradients": gradients(model)}


def kinds_of(tensor):
    import spmd_types as spmd

    return spmd.get_local_type(tensor)


@program(ranks=PAIR, needs=NEEDS)
def annotated_without_checks(api, ranks):
    mesh, dims = mesh_named("data")
    model = shard(api, annotated(mesh), mesh, dims, reshard_after_forward=False)
    return {"trained": train(model, adam(model), inputs(mesh, 3), max_norm=0.5), "state": model.state_dict()}


@program(ranks=PAIR, needs=NEEDS, variants=[("data",), ("tensor",)])
def annotated_and_copied(api, ranks, name):
    """A copy of ours does what FSDP2's original does."""
    mesh, dims = mesh_named(name)
    model = shard(api, annotated(mesh), mesh, dims)
    first, second = inputs(mesh, 2)
    with typechecking(mesh):
        model(first)
    if api is fsdp:
        model = copy.deepcopy(model)
    inside = []
    model[0].up.register_forward_pre_hook(lambda module, args: inside.extend(types_of(model[0])))
    with typechecking(mesh):
        y = model(second)
    y.square().mean().backward()
    return {"inside": inside, "gradients": gradients(model), "after": shown(model)}


@program(ranks=PAIR, needs=NEEDS)
def annotated_in_backward_that_is_checked(api, ranks):
    mesh, dims = mesh_named("tensor")
    model = shard(api, annotated(mesh), mesh, dims)
    with typechecking(mesh):
        for x in inputs(mesh, 2):
            y = model(x)
            y.backward(torch.ones_like(y))
    return gradients(model)


@program(ranks=PAIR, needs=NEEDS)
def annotated_on_a_part_of_the_mesh(api, ranks):
    import spmd_types as spmd

    mesh, dims = mesh_named("tensor")
    model = annotated(mesh, is_whole=False)
    with spmd.set_current_mesh(mesh):
        shard(api, model, mesh, dims)
    with typechecking(mesh):
        y = model(inputs(mesh, 1)[0])
    y.square().mean().backward()
    return {"inside": types_of(model), "gradients": gradients(model)}


@program(ranks=PAIR, needs=NEEDS)
def annotated_and_wrong(api, ranks):
    import spmd_types as spmd

    mesh, dims = mesh_named("data")
    group = mesh.get_group()

    def attempt(kind, **options):
        layer = nn.Linear(WIDTH, WIDTH)
        with typechecking(mesh):
            for parameter in layer.parameters():
                spmd.assert_type(parameter, {group: kind} if kind else {})
        before = types_of(layer)
        return error_of(lambda: api.fully_shard(layer, **options)), before == types_of(layer)

    asked = dict(mesh=mesh, dp_mesh_dims=api.DataParallelMeshDims(**dims))
    unnamed = dict(mesh=shared_mesh(ranks))
    both = shared_mesh(1, 2, names=("dp", "tp"))
    partly = dict(mesh=both, dp_mesh_dims=api.DataParallelMeshDims(shard="dp"))
    one_tensor_rank = dict(partly, mesh=shared_mesh(2, 1, names=("dp", "tp")))
    return [attempt(spmd.R, **asked), attempt(spmd.S(0), **asked), attempt(spmd.I, **asked), attempt(spmd.V, **asked),
            attempt(spmd.R, **unnamed), attempt(None, **asked), attempt(spmd.V, **partly),
            attempt(spmd.R, **one_tensor_rank)]
