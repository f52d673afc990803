"""all_gather_overlap over gloo and NCCL: the library and FSDP2 in turns, with collectives timed alone for the bound.

With NCCL the ranks are processes with a GPU each, or all on one where NCCL lets them (NCCL_MULTI_RANK_GPU_ENABLE=1 with
NCCL_MAX_CTAS=2, from NCCL 2.30 on). Ours go through the library's own NCCL communicator. Layers keep the GPU busy with
one spinning kernel, calibrated at the start, so a step's time holds what its other kernels and launches take besides.
"""

import os
from dataclasses import dataclass

import conductor
import harness
import overlap_bound
import stack

MEGABYTE = 1 << 20
IMPLS = ("fsdp", "fsdp2")


@dataclass(frozen=True)
class Setting:
    network: str
    world: int
    layers: int
    size: int
    repeats: int


@dataclass(frozen=True)
class Alone:
    """Microseconds of one layer's collectives, timed alone."""

    gather: float
    reduce: float

    def step(self, layers):
        """Of a step that gathers all layers twice but the last."""
        return (2 * layers - 1) * self.gather + layers * self.reduce


def gpus():
    """The ranks of a world over NCCL: a GPU each, or two on one."""
    import torch

    count = torch.cuda.device_count()
    if count == 0:
        raise SystemExit("all_gather_overlap: --network nccl needs a CUDA device, found none; simulated networks and gloo "
                         "run anywhere")
    return 2 if count == 1 and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" else count


def run(options, report):
    is_gpu = options.network == "nccl"
    megabytes = (options.megabytes or [64 if is_gpu else 4])[0]
    ranks = gpus() if is_gpu else 2
    setting = Setting(network=options.network, world=(options.worlds or [ranks])[0], layers=4 if options.quick else options.layers,
                      size=int(megabytes * MEGABYTE), repeats=2 if options.quick else options.repeats)
    report.setting(layers=setting.layers, bytes=f"{megabytes:g} MiB a layer", dtype="float32", world=setting.world,
                   device="CUDA, NCCL" if is_gpu else "CPU, 1 thread a rank, gloo", compute="spins",
                   time="wall clock to the end on the device, of the slower rank",
                   warm_up_steps=3, repeats=setting.repeats)
    rows = []
    with conductor.Workers() as workers:
        alone = time_alone(workers, setting)
        for ratio in options.ratios:
            forward_us = round(alone.step(setting.layers) / ratio / 3 / setting.layers, 3)
            made = stack.Stack(forward_us=(forward_us,) * setting.layers, bytes=(setting.size,) * setting.layers,
                               world=setting.world, clock="real", backend=setting.network)
            times, memory = measure(workers, made, setting)
            rows += report_point(report, made, alone, {"ratio": ratio, "memory_bytes": memory}, times)
    report.note("\nmicroseconds a step; the bound is for this schedule's collectives, timed alone")
    report.table(["impl", "ratio", "median", "p10", "p90", "compute", "exposed", "bound"], rows)


def command(impl):
    return (conductor.overlap_command(harness.build_dir()) if impl == "fsdp"
            else conductor.pytorch_command("overlap.py"))


def time_alone(workers, setting):
    made = stack.Stack(forward_us=(1.0,), bytes=(setting.size,), world=setting.world, clock="real",
                       backend=setting.network)
    ranks = workers.start_world("alone", command("fsdp"), setting.world)
    ranks.ask(made.request())
    replies = ranks.ask({"do": "alone", "bytes": [made.layer_bytes(0)], "repeats": 20})
    ranks.close()
    return Alone(*(harness.median([max(times) for times in zip(*(reply[kind][0] for reply in replies))])
                   for kind in ("gather_us", "reduce_us")))


def measure(workers, made, setting):
    """The implementations' times, taken in turns, and the most unsharded bytes of ours."""
    started = {impl: workers.start_world(impl, command(impl), setting.world) for impl in IMPLS}
    times = {impl: [] for impl in IMPLS}
    for world in started.values():
        world.ask(made.request())
        world.ask({"do": "run", "warmup": 3, "steps": 0})
    memory = 0
    for _ in range(setting.repeats):
        for impl in IMPLS:
            replies = started[impl].ask({"do": "run", "warmup": 0, "steps": 1})
            times[impl].append(max(reply["steps"][0]["total_us"] for reply in replies))
            if impl == "fsdp":
                memory = replies[0]["steps"][0]["peak_unsharded_bytes"]
    for world in started.values():
        world.close()
    return times, memory


def report_point(report, made, alone, about, times):
    layers = len(made.bytes)
    bound_us = overlap_bound.floor(made.machine(about["memory_bytes"], [alone.gather] * layers,
                                                [alone.reduce] * layers))
    for impl in IMPLS:
        spread = harness.spread(times[impl], "us")
        total, compute = spread["median_us"], made.compute_us()
        report.case(network=made.backend, impl=impl, world=made.world, total_us=total, compute_us=round(compute, 3),
                    communication_us=round(alone.step(layers), 3), exposed_us=round(total - compute, 3),
                    bound_us=round(bound_us, 3), **about, **spread)
        yield [impl, about["ratio"], *spread.values(), compute, total - compute, bound_us]
