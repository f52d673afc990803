"""Nothing waits too little: the same results when streams are late at random, and freed memory is written over. And
nothing waits too much: a step's host work goes on while the device is busy.
"""

import os
import random
import time
from unittest import mock

import torch

import fsdp

from .common import STEPS, adam, batch, case, compare, make_model, shard, train, train_plain

PRIORITIES = (0, -1, -2, -3)
STREAMS_A_POOL = 32
LONGEST_CYCLES = 2_000_000  # about a millisecond


class Delays:
    """Keeps streams busy for random times. torch hands its streams out in turns, from a pool for each priority: taken
    as many times as there are, all are seen, the library's and the process groups' too."""

    def __init__(self, device, seed):
        self.draw = random.Random(seed)
        self.pools = [[torch.cuda.Stream(device, priority=priority) for _ in range(STREAMS_A_POOL)]
                      for priority in PRIORITIES]
        self.delays = 0

    def __call__(self, *_):
        kind = self.draw.random()
        if kind < 0.3:
            self.sleep(torch.cuda.current_stream(), LONGEST_CYCLES)
        elif kind < 0.8:
            for stream in self.draw.choice(self.pools):
                self.sleep(stream, LONGEST_CYCLES // 8)

    def sleep(self, stream, longest):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(self.draw.randrange(1000, longest))
        self.delays += 1


def write_over_free_memory(device):
    """What has been freed on this stream and is given out again now."""
    for numel in (1 << 10, 1 << 14, 1 << 17, 1 << 20):
        torch.full((numel,), float("nan"), device=device)


def disturb(model, disturbance):
    """Before and behind each block's forward, and in backward."""
    def behind(module, inputs, output):
        disturbance()
        output.register_hook(disturbance)

    for block in model.blocks:
        block.register_forward_pre_hook(lambda *_: disturbance())
        block.register_forward_hook(behind)


VARIANTS = {
    "released": {},
    "kept": {"reshard_after_forward": False},
    "offloaded": {"offload_policy": fsdp.CPUOffloadPolicy(pin_memory=True)},
    "mixed": {"mp_policy": fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    "event": {},
    "distant": {},
    "accumulating": {},
    "sanitized": {},
}


@case(variants=[(name, seed) for name in VARIANTS for seed in (1, 2)])
def late_streams(place, variant, seed):
    place.needs_gpu()
    torch.utils.deterministic.fill_uninitialized_memory = True
    mesh, options = place.mesh(), VARIANTS[variant]
    accumulating = {"micro_batches": 2, "accumulate": True} if variant == "accumulating" else {}
    if variant == "mixed":
        quiet = shard(place, make_model(place), mesh=mesh, **options)
        wanted = train(place, quiet, adam(quiet), steps=2 * STEPS)
    else:
        plain = make_model(place)
        wanted = train_plain(place, plain, adam(plain), steps=2 * STEPS,
                             micro_batches=accumulating.get("micro_batches", 1))
    sanitizes = {"FSDP_SANITIZE": "1", "FSDP_SANITIZE_SEED": str(seed)} if variant == "sanitized" else {}
    with mock.patch.dict(os.environ, sanitizes):
        model = shard(place, make_model(place), mesh=mesh, **options)
    if variant == "distant":
        model.set_prefetch_distance(3)
    delays = Delays(place.device, seed)

    def disturbance(*_):
        delays()
        write_over_free_memory(place.device)

    def after_step(model):
        if variant == "event":
            model.set_post_optim_event(torch.cuda.current_stream().record_event())
        disturbance()

    disturb(model, disturbance)
    found = train(place, model, adam(model), steps=2 * STEPS, after_step=after_step, **accumulating)
    torch.utils.deterministic.fill_uninitialized_memory = False
    return {"delays": delays.delays, **compare(found, wanted, None if variant == "mixed" else mesh)}


@case(worlds=("one", "fake", "nccl"), variants=[("released",), ("kept",), ("event",)])
def host_goes_on(place, variant):
    """With the device busy before a step, the host is through with forward and backward before the device begins."""
    place.needs_gpu()
    model = shard(place, make_model(place), **VARIANTS[variant])
    optimizer = adam(model)
    tokens = batch(place, place.rank, 0)

    def step():
        optimizer.zero_grad()
        model(tokens).backward()
        optimizer.step()
        if variant == "event":
            model.set_post_optim_event(torch.cuda.current_stream().record_event())

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    torch.cuda._sleep(1_000_000_000)  # about half a second
    step()
    issued = time.perf_counter() - begin
    torch.cuda.synchronize()
    whole = time.perf_counter() - begin
    assert issued < 0.5 * whole, f"the host needed {issued:.3f} s of {whole:.3f} s: something waits for the device"
    return {"issued_s": issued, "whole_s": whole}


@case(worlds=("one", "fake", "nccl"))
def no_synchronization(place):
    """Of those that torch itself sees: copies to the host, and the like."""
    place.needs_gpu()
    model = shard(place, make_model(place))
    optimizer = adam(model)
    tokens = batch(place, place.rank, 0)
    for step in range(4):
        optimizer.zero_grad()
        torch.cuda.set_sync_debug_mode("error" if step > 1 else "default")
        try:
            model(tokens).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        optimizer.step()
    return {}
