"""The device's memory, as torch's allocator counts it."""

import gc

import torch
import torch.distributed.fsdp

import fsdp

from .common import adam, batch, case, make_model, shard

LARGE = {"blocks": 6, "width": 1024, "hidden": 4096}


def peak_of_a_step(place, api, **options):
    """Bytes above what is there before the model is made, and those that stay from step to step."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model = shard(place, make_model(place, **LARGE), api, **options)
    optimizer = adam(model, fused=True)
    tokens = batch(place, place.rank, 0)
    between = []
    for _ in range(4):
        torch.cuda.reset_peak_memory_stats()
        model(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        between.append(torch.cuda.memory_allocated() - before)
    return torch.cuda.max_memory_allocated() - before, between


@case(worlds=("one", "fake", "nccl"), variants=[(True,), (False,)])
def peak(place, reshard):
    """At most FSDP2's, within the allocator's rounding; nothing is left behind by a step."""
    place.needs_gpu()
    theirs, _ = peak_of_a_step(place, torch.distributed.fsdp, reshard_after_forward=reshard)
    ours, between = peak_of_a_step(place, fsdp, reshard_after_forward=reshard)
    found = {"ours": ours, "fsdp2": theirs, "ratio": round(ours / theirs, 4)}
    assert between[-1] == between[-2], f"bytes between steps: {between}"
    assert ours <= 1.01 * theirs, f"peak bytes of a step: {found}"
    return found


@case(worlds=("nccl",))
def released(place):
    """After a forward and after a step only the root's group is there."""
    place.needs_gpu()
    model = shard(place, make_model(place, **LARGE))
    tokens = batch(place, place.rank, 0)
    block_bytes = sum(parameter.numel() * 4 for parameter in model.blocks[0].parameters())
    before = torch.cuda.memory_allocated()
    with torch.no_grad():
        for _ in range(2):
            model(tokens)
    model.reshard()
    torch.cuda.synchronize()
    left = torch.cuda.memory_allocated() - before
    assert left < block_bytes, f"{left} bytes are left of forwards; a block has {block_bytes}"
    return {"left": left, "block": block_bytes}
