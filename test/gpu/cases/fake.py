"""A world of eight of which only this rank is there: what it gathers is not what others have, but all of it runs."""

import torch
from torch.distributed.device_mesh import init_device_mesh

import fsdp

from .common import adam, batch, case, make_model, shard


def steps(place, model):
    optimizer = adam(model)
    for index in range(3):
        optimizer.zero_grad()
        loss = model(batch(place, place.rank, index))
        loss.backward()
        for parameter in model.parameters():
            assert parameter.grad is not None and parameter.grad.to_local().shape == parameter.to_local().shape
        if place.is_gpu:
            torch.cuda.synchronize()
    counts = model.statistics()
    assert counts["all_gathers"] > 0 and counts["reductions"] > 0, f"nothing was communicated: {counts}"
    return {key: counts[key] for key in ("all_gathers", "reductions")}


@case(worlds=("fake",), variants=[(True,), (False,), (2,), (4,)])
def fake_world(place, reshard_after_forward):
    return steps(place, shard(place, make_model(place), reshard_after_forward=reshard_after_forward))


@case(worlds=("fake",))
def fake_hybrid(place):
    mesh = init_device_mesh(place.device.type, (2, place.ranks // 2), mesh_dim_names=("replicate", "shard"))
    return steps(place, shard(place, make_model(place), mesh=mesh))


@case(worlds=("fake",))
def fake_mixed_precision(place):
    policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return steps(place, shard(place, make_model(place), mp_policy=policy))


@case(worlds=("fake",))
def fake_offload(place):
    return steps(place, shard(place, make_model(place), offload_policy=fsdp.CPUOffloadPolicy()))
