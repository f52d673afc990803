"""The all-gather and the reduction of one group against one raw collective of the same bytes, beside FSDP2.

gather: unshard() and reshard() of a group of eight parameters, over c10d's raw all-gather into memory that is reused.
reduce: a backward that makes every gradient and reduces them, less the same backward of the plain module, over c10d's
raw reduce-scatter. Two gloo processes, each measurement after a barrier, everything in turns; a time is the slower
rank's. Bandwidth is algorithm bandwidth: bytes of the whole group over the time, in 10^9 bytes a second.
"""

import arguments
import conductor
import harness

IMPLS = ("fsdp", "fsdp2")
MEASUREMENTS = {
    "fsdp": ("gather", "raw_gather", "backward", "plain_backward", "raw_reduce"),
    "fsdp2": ("gather", "raw_gather", "raw_gather_fresh", "backward", "plain_backward", "raw_reduce"),
}


def add_options(parser):
    parser.add_argument("--dims", type=arguments.wholes(1), default=[512, 1024],
                        help="four matrices of [dim, dim] (default 512,1024)")
    parser.add_argument("--impl", choices=("all",) + IMPLS, default="all")
    parser.add_argument("--ranks", type=arguments.whole(1), default=2)
    parser.add_argument("--warmup", type=arguments.whole(0), default=3, help="of each measurement (default 3)")
    parser.add_argument("--times", type=arguments.whole(1), default=3, help="measurements a turn (default 3)")
    parser.add_argument("--repeats", type=arguments.whole(1), default=10, help="turns (default 10)")


def command(impl):
    if impl == "fsdp":
        return conductor.fsdp_command(harness.build_dir(), "gather_bandwidth")
    return conductor.pytorch_command("gather_bandwidth.py")


def slower_rank(replies):
    return [max(times) for times in zip(*(reply["seconds"] for reply in replies))]


def measure(worlds, dim, options):
    """Bytes of the group, and {(impl, measurement): [seconds]}."""
    for world in worlds.values():
        group_bytes = world.ask({"do": "setup", "dim": dim, "matrices": 4})[0]["bytes"]
    items = [(impl, what) for impl in worlds for what in MEASUREMENTS[impl]]
    for impl, what in items:
        worlds[impl].ask({"do": what, "times": options.warmup})
    times = {item: [] for item in items}
    for _ in range(options.repeats):
        for impl, what in items:
            times[impl, what] += slower_rank(worlds[impl].ask({"do": what, "times": options.times}))
    return group_bytes, times


def raw(times, what):
    """c10d's raw collective if PyTorch's side runs, else the one of our communicator."""
    return harness.median(times["fsdp2", what] if ("fsdp2", what) in times else times["fsdp", what])


def report_dim(dim, group_bytes, times, worlds, options, report):
    rows = []
    for (impl, what), samples in times.items():
        middle = harness.median(samples)
        report.case(impl=impl, measurement=what, dim=dim, bytes=group_bytes, ranks=options.ranks,
                    gb_per_s=round(group_bytes / middle / 1e9, 4), **harness.spread(samples, "ms", 1e3))
        rows.append([impl, what, *harness.spread(samples, "ms", 1e3).values(), group_bytes / middle / 1e9])
    report.note(f"\n{group_bytes:,} bytes (dim {dim})")
    report.table(["impl", "measurement", "median ms", "p10", "p90", "GB/s"], rows)
    for impl in worlds:
        gather = harness.median(times[impl, "gather"]) / raw(times, "raw_gather")
        reduction = harness.median(times[impl, "backward"]) - harness.median(times[impl, "plain_backward"])
        reduce = reduction / raw(times, "raw_reduce")
        report.case(impl=impl, measurement="ratio", dim=dim, bytes=group_bytes, ranks=options.ranks,
                    gather_over_raw=round(gather, 3), reduce_over_raw=round(reduce, 3))
        report.note(f"  {impl}: gather {gather:.2f} of raw, reduce {reduce:.2f} of raw")


def run(options, report):
    impls = IMPLS if options.impl == "all" else (options.impl,)
    dims = options.dims
    if options.quick:
        dims, options.repeats, options.warmup = dims[:1], 3, 2
    harness.build(options, [harness.PROGRAM] if "fsdp" in impls else [])
    report.setting(shape="4 x [dim, dim] and 4 x [dim]", dims=dims, dtype="float32",
                   bytes=[16 * (dim * dim + dim) for dim in dims], world=options.ranks,
                   device="CPU, 1 thread a rank, gloo", time="wall clock", warm_up=options.warmup,
                   repeats=options.repeats * options.times)
    with conductor.Workers() as workers:
        worlds = {impl: workers.start_world(impl, command(impl), options.ranks) for impl in impls}
        for dim in dims:
            group_bytes, times = measure(worlds, dim, options)
            report_dim(dim, group_bytes, times, worlds, options, report)
