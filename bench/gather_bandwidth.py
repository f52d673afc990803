"""The all-gather and the reduction of one group against one raw collective of the same bytes, beside FSDP2.

gather: unshard() and reshard() of a group of eight parameters. reduce: a backward that makes every gradient and reduces them,
less the same backward of the plain module. Two gloo processes, each measurement after a barrier, everything in turns; a time
is the slower rank's. Bandwidth is algorithm bandwidth: bytes of the whole group over the time, in 10^9 bytes a second.

Each implementation is divided by a raw collective over its own transport: `over_raw` by one into memory that is reused,
`over_fresh` by one into memory that is allocated for it, as that of a gather is. Then the transports, one over the other: both
raw, both into fresh memory.
"""

import arguments
import conductor
import harness

IMPLS = ("fsdp", "fsdp2")
QUICK = {"dims": [128], "warmup": 1, "times": 1, "repeats": 2}
MEASUREMENTS = ("gather", "raw_gather", "raw_gather_fresh", "backward", "plain_backward", "raw_reduce")


def add_options(parser):
    parser.add_argument("--dims", type=arguments.wholes(1), default=[256, 512, 1024, 2048],
                        help="four matrices of [dim, dim], in all 1, 4, 17 and 67 MB (default 256,512,1024,2048)")
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
    items = [(impl, what) for impl in worlds for what in MEASUREMENTS]
    for impl, what in items:
        worlds[impl].ask({"do": what, "times": options.warmup})
    times = {item: [] for item in items}
    for _ in harness.progress(range(options.repeats), f"turns, dim {dim}"):
        for impl, what in items:
            times[impl, what] += slower_rank(worlds[impl].ask({"do": what, "times": options.times}))
    return group_bytes, times


def ratios(times, impl):
    """Of an implementation's medians, over its own transport's."""
    median = {what: harness.median(times[impl, what]) for what in MEASUREMENTS}
    reduction = median["backward"] - median["plain_backward"]
    return {"gather_over_raw": round(median["gather"] / median["raw_gather"], 3),
            "gather_over_fresh": round(median["gather"] / median["raw_gather_fresh"], 3),
            "reduce_over_raw": round(reduction / median["raw_reduce"], 3)}


def transport_ratios(times):
    """Of our transport's medians, over c10d's."""
    return {f"{what}_over_c10d": round(harness.median(times["fsdp", what]) / harness.median(times["fsdp2", what]), 3)
            for what in ("raw_gather_fresh", "raw_reduce")}


def report_dim(dim, group_bytes, times, worlds, options, report):
    rows = []
    for (impl, what), samples in times.items():
        middle = harness.median(samples)
        report.case(impl=impl, measurement=what, dim=dim, bytes=group_bytes, ranks=options.ranks,
                    gb_per_s=round(group_bytes / middle / 1e9, 4), **harness.spread(samples, "ms", 1e3))
        rows.append([impl, what, *harness.spread(samples, "ms", 1e3).values(), group_bytes / middle / 1e9])
    report.note(f"\n{group_bytes:,} bytes (dim {dim})")
    report.table(["impl", "measurement", "median ms", "p10", "p90", "GB/s"], rows)
    about = {"dim": dim, "bytes": group_bytes, "ranks": options.ranks}
    found = {impl: ratios(times, impl) for impl in worlds}
    for impl, of_impl in found.items():
        report.case(impl=impl, measurement="ratio", **about, **of_impl)
    report.table(["impl", "gather over raw", "over raw into fresh memory", "reduce over raw"],
                 [[impl, *of_impl.values()] for impl, of_impl in found.items()])
    if len(found) == len(IMPLS):
        report.case(impl="fsdp", measurement="transport", **about, **transport_ratios(times))
        gather, reduce = transport_ratios(times).values()
        report.note(f"  raw over our transport, of c10d's time: gather into fresh memory {gather:.2f}, reduce {reduce:.2f}")


def run(options, report):
    impls = IMPLS if options.impl == "all" else (options.impl,)
    dims = options.dims
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
