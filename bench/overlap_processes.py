"""all_gather_overlap over gloo and NCCL: the library and FSDP2 in turns, with collectives timed alone for the bound.

With NCCL the ranks are processes with a GPU each: what ranks that share one take says nothing. Ours go through the library's own NCCL communicator. Layers keep the GPU busy with
one spinning kernel, calibrated at the start, so a step's time holds what its other kernels and launches take besides.
host_us: until the host has issued the step; where compute spins on the host that is all of it. peak_live_bytes: of tensors
on the device, null where nothing counts them. FSDP2 has no prefetch distance and no budget: beside each of ours it is as
it comes. Values are not looked at.
"""

from dataclasses import dataclass, replace

import conductor
import harness
import overlap_bound
import stack

MEGABYTE = 1 << 20
IMPLS = ("fsdp", "fsdp2")
WARM_UP = 3  # steps


@dataclass(frozen=True)
class Alone:
    """Microseconds of one layer's collectives, timed alone."""

    gather: float
    reduce: float

    def step(self, layers):
        """Of a step that gathers all layers twice but the last."""
        return (2 * layers - 1) * self.gather + layers * self.reduce


def gpus():
    """The ranks of a world over NCCL: a GPU each."""
    import torch

    count = torch.cuda.device_count()
    if count == 0:
        raise SystemExit("all_gather_overlap: --network nccl needs a CUDA device, found none; simulated networks and gloo "
                         "run anywhere")
    if count == 1:
        raise SystemExit("all_gather_overlap: --network nccl needs two CUDA devices, found one; --network stream simulates a link "
                         "on one")
    return count


def run(options, report):
    is_gpu = options.network == "nccl"
    ranks = gpus() if is_gpu else 2
    megabytes = options.megabytes or [64 if is_gpu else 4]
    report.setting(layers=options.layers, mebibytes_a_layer=megabytes, dtype="float32", worlds=options.worlds or [ranks],
                   device="CUDA, NCCL" if is_gpu else "CPU, 1 thread a rank, gloo", compute="spins",
                   time="wall clock to the end on the device, of the slower rank",
                   warm_up_steps=WARM_UP, repeats=options.repeats)
    memories = [{"prefetch": distance} for distance in options.prefetch]
    memories += [{"prefetch": distance, "budget_layers": layers} for layers in options.budgets
                 for distance in options.prefetch]
    rows = []
    with conductor.Workers() as workers:
        for world in options.worlds or [ranks]:
            for size in (int(mebibytes * MEGABYTE) for mebibytes in megabytes):
                alone = time_alone(workers, options.network, world, size)
                for memory in memories:
                    for ratio in options.ratios:
                        made = make_stack(options, world, size, memory, alone, ratio)
                        measured = measure(workers, made, options.repeats)
                        rows += report_point(report, made, alone, {"ratio": ratio, "size": size, **memory}, measured)
    report.note("\nmicroseconds a step; the bound is for this schedule's collectives, timed alone, within our memory")
    report.table(["impl", "world", "MiB", "case", "ratio", "median", "p10", "p90", "compute", "exposed", "bound", "host",
                  "peak MB"], rows)


def make_stack(options, world, size, memory, alone, ratio):
    forward_us = round(alone.step(options.layers) / ratio / 3 / options.layers, 3)
    made = stack.Stack(forward_us=(forward_us,) * options.layers, bytes=(size,) * options.layers, world=world,
                       clock="real", backend=options.network, prefetch=memory["prefetch"],
                       reduce_buffers=memory["prefetch"] + 1)
    layers = memory.get("budget_layers")
    return replace(made, budget=layers * made.layer_bytes(0)) if layers else made


def command(impl):
    return (conductor.overlap_command(harness.build_dir()) if impl == "fsdp"
            else conductor.pytorch_command("overlap.py"))


def time_alone(workers, network, world, size):
    made = stack.Stack(forward_us=(1.0,), bytes=(size,), world=world, clock="real", backend=network)
    ranks = workers.start_world("alone", command("fsdp"), world)
    ranks.ask(made.request())
    replies = ranks.ask({"do": "alone", "bytes": [made.layer_bytes(0)], "repeats": 20})
    ranks.close()
    return Alone(*(harness.median([max(times) for times in zip(*(reply[kind][0] for reply in replies))])
                   for kind in ("gather_us", "reduce_us")))


def measure(workers, made, repeats):
    """{implementation: the steps of all ranks}, taken in turns."""
    started = {impl: workers.start_world(impl, command(impl), made.world) for impl in IMPLS}
    steps = {impl: [] for impl in IMPLS}
    for world in started.values():
        world.ask(made.request())
        world.ask({"do": "run", "warmup": WARM_UP, "steps": 0})
    for _ in range(repeats):
        for impl in IMPLS:
            replies = started[impl].ask({"do": "run", "warmup": 0, "steps": 1})
            steps[impl].append([reply["steps"][0] for reply in replies])
    for world in started.values():
        world.close()
    return steps


def report_point(report, made, alone, about, measured):
    layers = len(made.bytes)
    memory = made.budget or max(ranks[0]["peak_unsharded_bytes"] for ranks in measured["fsdp"])
    bound_us = overlap_bound.floor(made.machine(memory, [alone.gather] * layers, [alone.reduce] * layers))
    compute, communication = made.compute_us(), alone.step(layers)
    for impl in IMPLS:
        spread = harness.spread([max(rank["total_us"] for rank in ranks) for ranks in measured[impl]], "us")
        host = harness.median([max(rank["issued_us"] for rank in ranks) for ranks in measured[impl]])
        peaks = [rank["peak_live_bytes"] for ranks in measured[impl] for rank in ranks]
        peak = None if None in peaks else max(peaks)
        total = spread["median_us"]
        report.case(network=made.backend, impl=impl, world=made.world, total_us=total, compute_us=round(compute, 3),
                    communication_us=round(communication, 3), exposed_us=round(total - compute, 3),
                    bound_us=round(bound_us, 3), over_bound_percent=round(100 * (total / bound_us - 1), 2),
                    overlap_percent=round(stack.overlap_percent(total, compute, communication, bound_us), 1),
                    bound_memory_bytes=memory, host_us=round(host, 3), peak_live_bytes=peak, **about, **spread)
        case = f"prefetch {about['prefetch']}"
        if "budget_layers" in about:
            case += f", budget {about['budget_layers']} layers"
        yield [impl, made.world, f"{about['size'] / MEGABYTE:g}", case if impl == "fsdp" else "", about["ratio"],
               *spread.values(), compute, total - compute, bound_us, host, "-" if peak is None else f"{peak / 1e6:.1f}"]
