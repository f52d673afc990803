"""all_gather_overlap on simulated networks: the library's schedule beside its bound, FSDP2 and DDP."""

from dataclasses import dataclass, replace

import conductor
import harness
import networks
import overlap_schedulers
import stack

MEGABYTE = 1 << 20
WORLDS = {"nvlink": [8, 64], "infiniband": [16, 128, 1024]}
SHAPES = ("equal", "alternating", "large-first")
CLOSE = 1.1  # to the bound's exposed communication
ROUNDING_US = 0.01


def weights(shape, layers):
    """How large each layer is beside the mean one (of more than 3 layers)."""
    if shape == "equal":
        return [1.0] * layers
    if shape == "alternating":  # mixture-of-experts layers between dense ones
        return [(0.5, 1.5)[i % 2] for i in range(layers)]
    rest = (layers - 3) / (layers - 1) if layers > 3 else 1.0
    return [3.0] + [rest] * (layers - 1)  # an embedding first


def communication_us(network, layers, size):
    """Of a step that gathers all but the last layer twice, as most do."""
    one = network.latency_of_us() + network.sending_us(size)
    return (3 * layers - 1) * one


def make_stacks(network, options, case):
    """case: shape, size in bytes, ratio, and fields of Stack, or `defaults` for those of the library. One stack for each
    distance that is to be tried."""
    case = dict(case)
    buffers = options.reduce_buffers
    if case.pop("defaults", False):
        case["prefetch"], buffers = 1, 1
    shape, size, ratio = (case.pop(key) for key in ("shape", "size", "ratio"))
    shares = weights(shape, options.layers)
    compute = communication_us(network, options.layers, size) / ratio
    # Time goes with bytes, but for an embedding, which computes next to nothing.
    times = [0.05] + [1.0] * (options.layers - 1) if shape == "large-first" else shares
    forward = [compute / 3 * share / sum(times) for share in times]
    distances = [case.pop("prefetch")] if "prefetch" in case else options.prefetch
    budget = case.pop("budget_layers", None)
    in_stream = options.network == "stream"
    made = stack.Stack(forward_us=tuple(round(us, 3) for us in forward), bytes=tuple(int(size * w) for w in shares),
                       world=network.world, network=network, stream=options.device if in_stream else None,
                       clock=options.clock, **case)
    if budget:
        made = replace(made, budget=budget * max(made.layer_bytes(i) for i in range(options.layers)))
    return [replace(made, prefetch=distance, reduce_buffers=buffers or distance + 1)
            for distance in distances]


def has_others(options):
    """Whether FSDP2 and DDP stand beside the library: where only a virtual clock moves, and the package is built."""
    return options.network != "stream" and options.clock == "virtual" and harness.has_target(harness.SIMULATED_DEVICE)


def cases(options):
    """Every case of the sweep but its ratio."""
    in_stream = options.network == "stream"
    sizes = [int(size * MEGABYTE) for size in options.megabytes or [64]]
    separations = [options.separate_reductions]
    if options.separate_reductions is None:
        separations = [False] if in_stream else [False, True]
    memories = [{"defaults": True}] if has_others(options) else []
    memories += [{"prefetch": distance} for distance in options.prefetch]
    memories += [{"budget_layers": layers} for layers in options.budgets]
    chosen = options.preset if in_stream else options.network
    for name in [chosen] if chosen else ["nvlink", "infiniband"]:
        few = options.quick or in_stream
        for world in options.worlds or (WORLDS[name][:1] if few else WORLDS[name]):
            for size in sizes:
                for shape in options.shapes:
                    for separate in separations:
                        for memory in memories:
                            if separate and "defaults" in memory and len(separations) > 1:
                                continue  # a group of their own is not the default
                            yield name, world, {"shape": shape, "size": size, "separate": separate, **memory}


def check_stream(options):
    if options.separate_reductions:
        raise SystemExit("all_gather_overlap: --network stream has one queue: two would share the bandwidth, and streams "
                         "cannot; leave out --separate-reductions, or take --network nvlink")
    if options.trace:
        raise SystemExit("all_gather_overlap: --network stream knows no moments to --trace; take a "
                         "profiler")
    options.clock = "virtual" if options.device == "cpu" else "real"  # a GPU's time is no other
    if options.device == "cpu":
        return
    if not harness.has_gpu():
        raise SystemExit("all_gather_overlap: --network stream needs a CUDA device, found none; --device cpu shows the "
                         "program without overlap, and simulated networks run anywhere")


@dataclass(frozen=True)
class Point:
    network: str
    world: int
    case: dict  # but the ratio
    ratio: float
    result: stack.Result  # ours
    others: dict  # {implementation: overlap_schedulers.Scheduled}

    @property
    def label(self):
        """What was set, but for the layers' shape."""
        if "defaults" in self.case:
            return "defaults"
        memory = (f"budget {self.case['budget_layers']} layers" if "budget_layers" in self.case
                  else f"prefetch {self.case['prefetch']}")
        return f"{memory}, {'two queues' if self.case['separate'] else 'one queue'}"

    @property
    def bound_exposed_us(self):
        return self.result.bound_us - self.result.compute_us

    def exposed_us(self, impl):
        return self.others[impl].total_us - self.result.compute_us

    @property
    def is_close(self):
        return self.result.exposed_us <= CLOSE * self.bound_exposed_us + ROUNDING_US

    @property
    def is_at_most_fsdp2(self):
        return self.result.exposed_us <= self.exposed_us("fsdp2") + ROUNDING_US

    def line(self):
        result, about = self.result, {}
        if self.others:
            about = {f"{impl}_exposed_us": round(self.exposed_us(impl), 3) for impl in ("fsdp2", "ddp")}
            about |= {f"{impl}_peak_live_bytes": one.peak_live_bytes for impl, one in self.others.items()}
        return dict(network=self.network, world=self.world, **{**result.line(), "ratio": self.ratio, **self.case},
                    is_reachable=result.is_reachable, **about)

    def row(self):
        result = self.result
        others = [self.exposed_us(impl) for impl in ("fsdp2", "ddp")] if self.others else ["-", "-"]
        return [self.network, self.world, self.case["size"] // MEGABYTE, f"{self.case['shape']}, {self.label}", self.ratio,
                result.compute_us, result.exposed_us, self.bound_exposed_us, *others,
                f"{round(100 * result.over_bound, 2) + 0.0:.2f}", f"{result.overlap_percent:.1f}"]


HEADERS = ["network", "world", "MiB", "case", "ratio", "compute", "exposed", "bound", "FSDP2", "DDP", "over", "overlap"]


class Sweep:
    """Asks the workers for one point after the other."""

    def __init__(self, options, workers):
        self.options = options
        self.steps = options.repeats if options.network == "stream" or options.clock == "real" else 1
        self.core = workers.start("overlap", conductor.overlap_command(harness.build_dir()))
        self.schedulers = overlap_schedulers.Schedulers(workers) if has_others(options) else None
        self.last = None

    def point(self, name, world, case, ratio):
        stacks = make_stacks(networks.PRESETS[name](world), self.options, {**case, "ratio": ratio})
        result = self.last = stack.simulate(self.core, *stacks, steps=self.steps)
        impls = self.impls(case)
        others = {impl: self.schedulers.step(impl, stacks[0]) for impl in impls}
        if "fsdp" in others:
            result = replace(result, total_us=others["fsdp"].total_us, host_clock_us=result.total_us)
        return Point(name, world, case, ratio, result, others)

    def impls(self, case):
        """The library is there as its own package where nobody has set anything."""
        if not self.schedulers:
            return ()
        return overlap_schedulers.IMPLS if "defaults" in case else ("fsdp2", "ddp")


def run(options, report):
    in_stream = options.network == "stream"
    if in_stream:
        check_stream(options)
    with conductor.Workers() as workers:
        sweep = Sweep(options, workers)
        report.setting(layers=options.layers, ratios=list(options.ratios), clock=options.clock, dtype="float32",
                       backward="twice the forward", warm_up_steps=3, repeats=sweep.steps,
                       device=f"{options.device}, a simulated network in a stream" if in_stream else "simulated network")
        points, rows = [], []
        for name, world, case in harness.progress(list(cases(options)), "cases"):
            of_case = []
            for ratio in options.ratios:
                point = sweep.point(name, world, case, ratio)
                spread = ({"stream": options.device, **harness.spread(point.result.totals_us, "us")} if in_stream else {})
                report.case(**point.line(), **spread)
                of_case.append(point)
            shown = of_case if "defaults" in case else [max(of_case, key=lambda point: point.result.over_bound)]
            rows += [point.row() for point in shown]
            points += of_case
    show(report, points, rows)
    if options.trace and sweep.last:
        options.trace.write_text(stack.chrome_trace(sweep.last.step, "all_gather_overlap"))
    if options.plot:
        import overlap_plot

        overlap_plot.draw(points, options.plot)


def show(report, points, rows):
    report.note("\nmicroseconds, of communication that is exposed: ours, the bound's, FSDP2's and DDP's; percent over the "
                "bound's step, and of the possible overlap. Of the defaults each ratio, of other cases the worst")
    report.table(HEADERS, rows)
    over = [point for point in points if point.result.over_bound > 0.05]
    report.note(f"\n{len(points)} points, {len(over)} of them more than 5% over the bound")
    graded = [point for point in points if "defaults" in point.case]
    if graded:
        report.note(f"exposed with the defaults: within 10% of the bound at {sum(point.is_close for point in graded)} of "
                    f"{len(graded)} points; at most FSDP2's at {sum(point.is_at_most_fsdp2 for point in graded)} of "
                    f"{len(graded)}")
