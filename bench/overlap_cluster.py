"""all_gather_overlap over real TCP: the library, FSDP2 and DDP, beside what the simulator says for the same.

Each rank has a network namespace of its own, behind a link of the rate that is asked for (tools/cluster.py). Layers wait
instead of computing, so that two cores suffice for all ranks. All three run with their defaults.

The simulated network (bench/overlap_schedulers.py) has the rate less what TCP's headers take of it, and as latency what a
collective of next to no bytes was seen to take. gloo's own reduce-scatter, which FSDP2 goes through, is an all-reduce; and
FSDP2 has no streams on a CPU, so nothing of it overlaps: the simulator is told both. That holds where the raw collectives,
alone in the same namespaces, reach 90% of the rate. Elsewhere something else takes the time, such as the processors that all
ranks share: there the simulator is given what the raw collectives were seen to take (`predicted_from`).
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import conductor
import harness
import networks
import overlap_schedulers
import stack

sys.path.append(str(Path(__file__).resolve().parents[1] / "tools"))
import cluster  # noqa: E402  its folder comes first

MEGABYTE = 1 << 20
IMPLS = overlap_schedulers.IMPLS
WARM_UP = 3  # steps
ALONE_REPEATS = 3  # a turn
GATHER_S = 0.04  # about what a layer's gather takes by default
LARGEST = 16 * MEGABYTE  # of a layer by default
PAYLOAD = 1448 / 1514  # of a frame over Ethernet: TCP's, with its timestamps
REACHED = 0.9  # of the rate
CLOSE = 0.1


def default_size(rate):
    """Bytes of a layer."""
    bytes_a_second = cluster.bits_a_second(rate) / 8
    return min(LARGEST, max(MEGABYTE // 4, round(GATHER_S * bytes_a_second / MEGABYTE * 4) * MEGABYTE // 4))


# How often a collective passes what an all-gather of the same bytes passes once.
PASSES = {"fsdp": {"reduce": 1}, "fsdp2": {"reduce": 2}, "ddp": {"all_reduce": 2}}
GATHERS = ("fsdp", "fsdp2")


def sent_us(rate, world, size):
    """Of a collective of `size` bytes that passes once, at the rate."""
    return 8e6 * size * (world - 1) / world / cluster.bits_a_second(rate)


@dataclass(frozen=True)
class Alone:
    """Raw collectives, in microseconds: the median of the slower rank."""

    launch_us: float  # of an all-gather of next to no bytes
    by_kind: dict  # of a layer's bytes: gather, reduce, all_reduce

    def reached(self, impl, sent):
        """What part of the rate the slowest gets of those that `impl` uses. sent: as sent_us has it."""
        parts = [passes * sent / self.by_kind[kind] for kind, passes in PASSES[impl].items()]
        return min(parts + [sent / self.by_kind["gather"]] * (impl in GATHERS))

    def sending_us(self, kind):
        return max(0.0, self.by_kind[kind] - self.launch_us)


def time_alone(ranks, made):
    """{(kind, number): [microseconds of the slower rank]}, for next to no bytes and a layer's. ranks: set up with a stack."""
    replies = ranks.ask({"do": "alone", "bytes": [made.world * stack.FLOAT_BYTES, made.layer_bytes(0)],
                         "repeats": ALONE_REPEATS})
    return {(kind.removesuffix("_us"), number): [max(times) for times in zip(*(reply[kind][number] for reply in replies))]
            for kind in replies[0] for number in (0, 1)}


def alone_of(turns):
    """turns: as time_alone returns them."""
    medians = {key: harness.median([us for turn in turns for us in turn[key]]) for key in turns[0]}
    return Alone(medians["gather", 0], {kind: us for (kind, number), us in medians.items() if number == 1})


class Place:
    """One rate and number of ranks: the ranks of all implementations, and the simulator."""

    def __init__(self, rate, world, network, workers, schedulers):
        self.rate, self.world, self.network, self.workers = rate, world, network, workers
        self.schedulers = schedulers
        # PyTorch's ranks begin slowly, and take one stack after the other.
        self.kept = {impl: self.start(impl) for impl in IMPLS if impl != "fsdp"}

    def start(self, impl):
        command = (conductor.overlap_command(harness.build_dir()) if impl == "fsdp"
                   else conductor.pytorch_command("overlap.py"))
        return self.workers.start_world(impl, command, self.world, cluster=self.network)

    def measure(self, made, repeats):
        """{implementation: (raw collectives, steps' times)}, all of it in turns: what the machine does meanwhile is in both."""
        started = {**self.kept, "fsdp": self.start("fsdp")}
        for impl in IMPLS:
            started[impl].ask({**made.request(), "impl": impl})
            started[impl].ask({"do": "run", "warmup": WARM_UP, "steps": 0})
        alone, times = ({impl: [] for impl in IMPLS} for _ in range(2))
        for _ in range(repeats):
            for impl in IMPLS:
                alone[impl].append(time_alone(started[impl], made))
                replies = started[impl].ask({"do": "run", "warmup": 0, "steps": 1})
                times[impl].append(max(reply["steps"][0]["total_us"] for reply in replies))
        started["fsdp"].close()
        return {impl: (alone_of(alone[impl]), times[impl]) for impl in IMPLS}

    def predict(self, impl, made, alone):
        """(a step's time, what it is told from)."""
        sent = sent_us(self.rate, self.world, made.layer_bytes(0))
        gigabytes_a_second = cluster.bits_a_second(self.rate) / 8 * 1e-9
        if alone.reached(impl, sent) >= REACHED:
            told_from, gigabytes_a_second, passes = "rate", gigabytes_a_second * PAYLOAD, PASSES[impl]
        else:
            once = alone.sending_us("gather")
            told_from, gigabytes_a_second = "raw", gigabytes_a_second * sent / once
            passes = {kind: alone.sending_us(kind) / once for kind in PASSES[impl]}
        network = networks.Network(self.world, latency_us=0, launch_us=alone.launch_us,
                                   bandwidth_gb_per_s=gigabytes_a_second)
        step = self.schedulers.step(impl, replace(made, network=network, clock="virtual"),
                                    passes={f"{kind}_passes": times for kind, times in passes.items()},
                                    one_stream=impl == "fsdp2")
        return step.total_us, told_from


def make_stack(options, rate, world, size, ratio):
    compute_us = (3 * options.layers - 1) * sent_us(rate, world, size) / ratio
    forward_us = round(compute_us / 3 / options.layers, 3)
    return stack.Stack(forward_us=(forward_us,) * options.layers, bytes=(size,) * options.layers, world=world,
                       clock="waits", backend="gloo")


def run(options, report):
    report.setting(layers=options.layers, rates=options.rates, worlds=options.worlds, ratios=list(options.ratios),
                   dtype="float32", device="CPU, 1 thread a rank, gloo over TCP", compute="waits",
                   time="wall clock, of the slower rank", warm_up_steps=WARM_UP, repeats=options.repeats)
    cluster.end_on_signals()  # without leaving namespaces behind
    points = []
    with conductor.Workers() as simulators:
        schedulers = overlap_schedulers.Schedulers(simulators)
        for rate in options.rates:
            for world in options.worlds:
                try:
                    with cluster.Cluster(world, rate) as network, conductor.Workers() as workers:
                        points += points_of(report, options, Place(rate, world, network, workers, schedulers))
                except cluster.NotAllowed as error:
                    raise SystemExit(f"all_gather_overlap: --network cluster: {error}") from None
    show(report, points)


def points_of(report, options, place):
    sizes = [int(size * MEGABYTE) for size in options.megabytes] if options.megabytes else [default_size(place.rate)]
    for size in sizes:
        for ratio in options.ratios:
            made = make_stack(options, place.rate, place.world, size, ratio)
            for impl, measured in place.measure(made, options.repeats).items():
                point = point_of(place, made, impl, *measured, {"size": size, "ratio": ratio})
                report.case(**point)
                yield point


def point_of(place, made, impl, alone, times, about):
    predicted, told_from = place.predict(impl, made, alone)
    spread = harness.spread(times, "us")
    total, compute = spread["median_us"], made.compute_us()
    reached = alone.reached(impl, sent_us(place.rate, place.world, made.layer_bytes(0)))
    return {"network": "cluster", "impl": impl, "rate": place.rate, "world": place.world, **about,
            "total_us": round(total, 3), "compute_us": round(compute, 3), "exposed_us": round(total - compute, 3),
            "predicted_us": round(predicted, 3), "error_percent": round(100 * (predicted / total - 1), 2),
            "predicted_from": told_from, "raw_percent_of_rate": round(100 * reached, 1),
            "launch_us": round(alone.launch_us, 1), "raw_us": {kind: round(us, 1) for kind, us in alone.by_kind.items()},
            **spread}


def show(report, points):
    report.note("\nmicroseconds a step; percent that the prediction is off, and of the rate that raw collectives reach alone")
    report.table(["impl", "rate", "world", "MiB", "ratio", "median", "p10", "p90", "compute", "exposed", "predicted", "from",
                  "off", "raw"],
                 [[point["impl"], point["rate"], point["world"], f"{point['size'] / MEGABYTE:g}", point["ratio"],
                   point["median_us"], point["p10_us"], point["p90_us"], point["compute_us"], point["exposed_us"],
                   point["predicted_us"], point["predicted_from"], f"{point['error_percent']:.1f}",
                   f"{point['raw_percent_of_rate']:.0f}"] for point in points])
    for told_from in ("rate", "raw"):
        for impl in IMPLS:
            told = [point for point in points if point["impl"] == impl and point["predicted_from"] == told_from]
            close = [point for point in told if abs(point["error_percent"]) <= 100 * CLOSE]
            report.note(f"{impl}, told from the {told_from}: within 10% at {len(close)} of {len(told)} points")
