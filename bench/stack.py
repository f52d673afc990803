"""Stacks of layers that take a chosen time: what is asked of `fsdp_bench_overlap`, and what its answers say."""

import json
from dataclasses import dataclass, field

import harness
import overlap_bound

FLOAT_BYTES = 4
COLUMNS = 8
STAND_IN_BYTES = 1 << 17  # of a layer, about
STAND_IN_PARTS = 16  # of the largest layer on each rank, at least: sizes are rounded to whole ones


@dataclass(frozen=True)
class Stack:
    """Layers by forward time and bytes, and how they are sharded."""

    forward_us: tuple
    bytes: tuple
    prefetch: int = 1
    budget: int | None = None  # of unsharded bytes
    separate: bool = False  # reductions over a communicator of their own
    reduce_buffers: int = 1
    backward_per_forward: float = 2.0
    world: int = 8
    reshard: bool | int | None = None
    clock: str = "virtual"
    network: object = field(default=None)  # simulated; None: processes
    backend: str = "gloo"  # of processes
    stream: str | None = None  # the type of the device that has the network's time pass in a stream; None: a clock does

    @property
    def scale(self):
        """Where only a clock moves, small tensors stand in for large ones: each of their bytes counts for so many."""
        stand_in = max(STAND_IN_BYTES, STAND_IN_PARTS * self.part_bytes)
        return max(1, max(self.bytes) // stand_in) if self.network and not self.stream else 1

    @property
    def part_bytes(self):
        """Of the stand-in: a row on each rank."""
        return self.world * COLUMNS * FLOAT_BYTES

    def rows(self, layer):
        """Of the stand-in: every rank has the same part."""
        return self.world * max(1, round(self.bytes[layer] / self.scale / self.part_bytes))

    def layer_bytes(self, layer):
        return self.rows(layer) * COLUMNS * FLOAT_BYTES * self.scale

    def request(self):
        layers = [{"params": [[self.rows(i), COLUMNS]], "forward_us": us,
                   "backward_us": us * self.backward_per_forward} for i, us in enumerate(self.forward_us)]
        return {"do": "setup", "layers": layers, "reshard": self.reshard, "prefetch": self.prefetch,
                "budget": self.budget and self.budget // self.scale, "separate": self.separate,
                "reduce_buffers": self.reduce_buffers, "mixed": False, "clock": self.clock, "replicas": 1,
                "backend": self.backend, "stream": self.stream,
                "network": self.network.scaled(self.scale).request() if self.network else None}

    def compute_us(self):
        return sum(self.forward_us) * (1 + self.backward_per_forward)

    def machine(self, memory, gather_us, reduce_us, latency_us=0.0):
        """What the bound is computed for: gather_us and reduce_us by layer."""
        layers = tuple(overlap_bound.Layer(
            forward=us, backward=us * self.backward_per_forward, gather=gather_us[i], reduce=reduce_us[i],
            bytes=self.layer_bytes(i), gather_latency=latency_us, reduce_latency=latency_us)
            for i, us in enumerate(self.forward_us))
        # Without a budget the layers are told to be released after forward. The last one is used again at once.
        may_stay = frozenset(range(len(layers))) if self.budget else frozenset([len(layers) - 1])
        return overlap_bound.Machine(layers, memory, 2 if self.separate else 1, may_stay)


def overlap_percent(total_us, compute_us, communication_us, bound_us):
    """Of the communication that the best schedule hides behind compute, how much this one hides."""
    possible = communication_us - (bound_us - compute_us)
    hidden = communication_us - (total_us - compute_us)
    return 100.0 if possible <= 0 else 100 * max(0.0, min(1.0, hidden / possible))


@dataclass(frozen=True)
class Result:
    """One step of a stack. Times in microseconds."""

    total_us: float  # the median of the steps
    compute_us: float
    communication_us: float  # of its collectives, each with the network to itself
    bound_us: float
    is_reachable: bool  # a schedule is known that reaches the bound
    floor_us: float  # no schedule is shorter, with a clock or without (overlap_bound.py)
    memory: int  # within which the bound is: the byte budget, else the peak
    peak: int  # most unsharded bytes at one time
    start: str  # of reductions (include/fsdp/reduce_scatter_start.hpp)
    by_size_us: float  # the least time with the default start
    by_prefetch: dict  # what each distance takes, as Measured
    step: dict = field(repr=False)  # the last one
    totals_us: tuple = field(repr=False)  # of all steps
    host_clock_us: float | None = None  # where total_us is another's: what the core took

    @property
    def prefetch(self):
        """The distance that takes the least time; of equal ones the least."""
        return min(self.by_prefetch, key=lambda distance: (self.by_prefetch[distance].total_us, distance))

    @property
    def exposed_us(self):
        return self.total_us - self.compute_us

    @property
    def over_bound(self):
        return self.total_us / self.bound_us - 1

    @property
    def overlap_percent(self):
        return overlap_percent(self.total_us, self.compute_us, self.communication_us, self.bound_us)

    def line(self):
        """The fields that the issue of the benchmark asks for, first."""
        return {"total_us": round(self.total_us, 3), "compute_us": round(self.compute_us, 3),
                "communication_us": round(self.communication_us, 3), "exposed_us": round(self.exposed_us, 3),
                "bound_us": round(self.bound_us, 3), "over_bound_percent": round(100 * self.over_bound, 2),
                "overlap_percent": round(self.overlap_percent, 1), "floor_us": round(self.floor_us, 3),
                "memory_bytes": self.memory, "all_gathers": self.step["all_gathers"], "start": self.start,
                "by_size_us": round(self.by_size_us, 3), "prefetch": self.prefetch,
                **({} if self.host_clock_us is None else {"host_clock_us": round(self.host_clock_us, 3)}),
                "by_prefetch_us": {distance: round(one.total_us, 3) for distance, one in self.by_prefetch.items()},
                "peak_live_bytes": {distance: one.peak_live for distance, one in self.by_prefetch.items()}}


@dataclass(frozen=True)
class Measured:
    """Steps of one stack."""

    step: dict = field(repr=False)  # the last one
    totals_us: tuple
    start: str
    by_size_us: float
    peak_live: int  # most bytes of tensors at one time

    @property
    def total_us(self):
        return harness.median(self.totals_us)


def measure(worker, stack, steps=1, warmup=3):
    """Steps after the order has been learned and planned for; where reductions have a queue of their own, with the start
    that takes them the least time."""
    def run():
        done = worker.ask({"do": "run", "warmup": warmup, "steps": steps})["steps"]
        return done[-1], tuple(step["total_us"] for step in done)

    worker.ask(stack.request())
    step, totals = run()
    start, by_size = "by_size", harness.median(totals)
    if stack.separate:
        # On a virtual clock one step is as all others.
        rounds = 1 if stack.clock == "virtual" else max(3, steps)
        start = worker.ask({"do": "choose start", "rounds": rounds})["start"]
        step, totals = run()
    return Measured(step, totals, start, by_size, step["peak_live_bytes"] * stack.scale)


def simulate(worker, *stacks, steps=1):
    """The fastest of stacks that differ in their prefetch distance and buffers alone, beside their bound. More than one
    need a byte budget: what may be unsharded, and so the bound, is then the same."""
    if len(stacks) > 1 and not all(stack.budget for stack in stacks):
        raise ValueError("several stacks: expected a byte budget in each, found none in some; simulate those one by one")
    measured = [measure(worker, stack, steps) for stack in stacks]
    stack, best = min(zip(stacks, measured), key=lambda pair: (pair[1].total_us, pair[0].prefetch))
    latency = stack.network.latency_of_us()
    alone = [latency + stack.network.sending_us(stack.layer_bytes(i)) for i in range(len(stack.bytes))]
    peak = best.step["peak_unsharded_bytes"] * stack.scale
    memory = stack.budget or peak
    bound = overlap_bound.bound(stack.machine(memory, alone, alone, latency), known=min(best.totals_us))
    communication = sum(transfer["alone_us"] for transfer in best.step["transfers"])
    return Result(best.total_us, stack.compute_us(), communication, *bound, memory, peak, best.start,
                  min(one.by_size_us for one in measured),
                  {stack.prefetch: one for stack, one in zip(stacks, measured)}, best.step, best.totals_us)


def chrome_trace(step, name):
    """The step in the Chrome trace format: what computes, and what travels, from launch to end."""
    events = [{"ph": "M", "pid": 0, "name": "process_name", "args": {"name": name}}]
    rows = {"compute": 0}
    for slice_ in step["compute"]:
        events.append({"ph": "X", "pid": 0, "tid": 0, "name": f"{slice_['pass']} layers.{slice_['layer']}",
                       "ts": slice_["begin_us"], "dur": slice_["end_us"] - slice_["begin_us"]})
    for transfer in step["transfers"]:
        row = rows.setdefault(f"{transfer['operation']} {transfer['group']}", len(rows))
        events.append({"ph": "X", "pid": 0, "tid": row, "name": f"{transfer['operation']} ({transfer['subject']})",
                       "ts": transfer["begin_us"], "dur": transfer["end_us"] - transfer["begin_us"],
                       "args": {"launched_us": transfer["start_us"],
                                "alone_us": transfer["alone_us"]}})
    for row, number in rows.items():
        events.append({"ph": "M", "pid": 0, "tid": number, "name": "thread_name", "args": {"name": row}})
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
