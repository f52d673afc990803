"""Training steps against the plain model, or FSDP2, on the same data."""

import torch
import torch.distributed.fsdp
from torch.distributed.device_mesh import init_device_mesh

import fsdp

from .common import Skip, adam, case, compare, make_model, shard, train, train_plain


def expected(place, **options):
    model = make_model(place)
    return train_plain(place, model, adam(model), **options)


@case(variants=[(True,), (False,), (1,), (2,)])
def reshard_after_forward(place, value):
    if type(value) is int and value > place.ranks:
        raise Skip("more ranks than there are")
    mesh = place.mesh()
    model = shard(place, make_model(place), mesh=mesh, reshard_after_forward=value)
    return compare(train(place, model, adam(model)), expected(place), mesh)


@case(variants=[("foreach",), ("fused",)])
def optimizer(place, kind):
    mesh = place.mesh()
    plain, model = make_model(place), shard(place, make_model(place), mesh=mesh)
    trained = train_plain(place, plain, adam(plain, **{kind: True}))
    return compare(train(place, model, adam(model, **{kind: True})), trained, mesh)


@case
def local_shards(place):
    mesh = place.mesh()
    model = shard(place, make_model(place), mesh=mesh)
    optimizer = adam(fsdp.local_shards(model), fused=True)
    plain = make_model(place)
    return compare(train(place, model, optimizer), train_plain(place, plain, adam(plain, fused=True)), mesh)


@case(variants=[(True,), (False,)])
def accumulation(place, reduces_once):
    mesh = place.mesh()
    model = shard(place, make_model(place), mesh=mesh)
    found = train(place, model, adam(model), micro_batches=3, accumulate=reduces_once)
    return compare(found, expected(place, micro_batches=3), mesh)


@case
def clip_grad_norm(place):
    mesh = place.mesh()
    model = shard(place, make_model(place), mesh=mesh)
    return compare(train(place, model, adam(model), max_norm=0.1), expected(place, max_norm=0.1), mesh)


@case(variants=[("replicas",), ("shards",)])
def hybrid(place, which):
    """One shard rank in each replica, or one replica."""
    shape = (place.ranks, 1) if which == "replicas" else (1, place.ranks)
    mesh = init_device_mesh(place.device.type, shape, mesh_dim_names=("replicate", "shard"))
    model = shard(place, make_model(place), mesh=mesh)
    return compare(train(place, model, adam(model)), expected(place), mesh)


@case(variants=[("bfloat16", "float32"), ("bfloat16", "bfloat16"), ("float16", "float32")])
def mixed_precision(place, param_dtype, reduce_dtype):
    """Against FSDP2."""
    policy = fsdp.MixedPrecisionPolicy(param_dtype=getattr(torch, param_dtype),
                                       reduce_dtype=getattr(torch, reduce_dtype))
    both = [shard(place, make_model(place), api, mp_policy=policy) for api in (fsdp, torch.distributed.fsdp)]
    ours, theirs = (train(place, model, adam(model)) for model in both)
    return compare(ours, theirs, None)


@case
def bfloat16_parameters(place):
    """Against the plain model in bfloat16, one step: its optimizer rounds what is left over otherwise."""
    mesh = place.mesh()
    plain = make_model(place).bfloat16()
    model = shard(place, make_model(place).bfloat16(), mesh=mesh)
    return compare(train(place, model, adam(model), steps=1), train_plain(place, plain, adam(plain), steps=1), mesh,
                   tolerance=1e-2)


@case
def beside_fsdp2(place):
    both = [shard(place, make_model(place), api) for api in (fsdp, torch.distributed.fsdp)]
    ours, theirs = (train(place, model, adam(model)) for model in both)
    return compare(ours, theirs, None)
