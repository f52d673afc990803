"""Saving and loading a sharded model against a raw write and read of the same bytes, beside torch.distributed.checkpoint.

Two gloo processes hold the same model in each library. raw_write: each rank its part of one file, by the library's own
calls: reserved first, in blocks of 1 MiB, the disk asked to begin every 16 MiB, and fsync; raw_read: the same from the page
cache. Every save goes to a new folder and ends on the disk, every load reads what was saved just before; `_cold`, after
its pages were dropped from the cache. start_save is how long a save in the background holds up a step. Everything in turns; a
time is the slower rank's, GB are 10^9 bytes of the whole model. extra: the most that a rank's process held meanwhile, over what
it held before, without the page cache.
"""

import tempfile

import arguments
import conductor
import harness

IMPLS = ("fsdp", "dcp")
# In this order a turn: what is compared follows one another.
TURN = (("fsdp", "raw_write"), ("fsdp", "save"), ("dcp", "save"), ("fsdp", "raw_read"), ("fsdp", "load"),
        ("fsdp", "load_unverified"), ("dcp", "load"), ("fsdp", "raw_read_cold"), ("fsdp", "load_cold"), ("dcp", "load_cold"),
        ("fsdp", "start_save"))
RAW = {"save": "raw_write", "load": "raw_read", "load_unverified": "raw_read", "load_cold": "raw_read_cold"}
MATRIX_MIB = 4
QUICK = {"mib": 16, "warmup": 0, "repeats": 2}


def add_options(parser):
    parser.add_argument("--mib", type=arguments.whole(MATRIX_MIB), default=1024,
                        help="of the model, in matrices of 4 MiB (default 1024)")
    parser.add_argument("--impl", choices=("all",) + IMPLS, default="all")
    parser.add_argument("--ranks", type=arguments.whole(1), default=2)
    parser.add_argument("--folder", type=arguments.folder, help="where files are written (default: the build folder)")
    parser.add_argument("--warmup", type=arguments.whole(0), default=1, help="turns before the measured ones (default 1)")
    parser.add_argument("--repeats", type=arguments.whole(1), default=7, help="turns (default 7)")


def command(impl):
    if impl == "fsdp":
        return conductor.fsdp_command(harness.build_dir(), "checkpoint")
    return conductor.pytorch_command("checkpoint.py")


def measure(impls, folder, options):
    """Bytes of the model, and {(impl, measurement): ([seconds], [extra bytes])}."""
    items = [item for item in TURN if item[0] in impls]
    found = {item: ([], []) for item in items}
    with conductor.Workers() as workers:
        worlds = {impl: workers.start_world(impl, command(impl), options.ranks) for impl in impls}
        for world in worlds.values():
            about = world.ask({"do": "setup", "matrices": options.mib // MATRIX_MIB, "folder": folder})
        for turn in harness.progress(range(options.warmup + options.repeats), "turns"):
            for impl, what in items:
                replies = worlds[impl].ask({"do": what})
                if turn >= options.warmup:
                    found[impl, what][0].append(max(reply["seconds"] for reply in replies))
                    found[impl, what][1].append(max(reply["extra_bytes"] for reply in replies))
    return about[0]["bytes"], found


def throughput_over(found, item, other):
    """Of pairs taken in turns: how many times the other's."""
    if other not in found or other == item:
        return None
    return harness.paired_ratio(found[other][0], found[item][0])["median_ratio"]


def show(model_bytes, found, options, report):
    rows = []
    for item, (seconds, extra) in found.items():
        impl, what = item
        speed = model_bytes / harness.median(seconds) / 1e9
        of_raw = throughput_over(found, item, ("fsdp", RAW.get(what)))
        of_dcp = throughput_over(found, item, ("dcp", what.removesuffix("_unverified")))
        extra_mib = round(max(extra) / 2**20, 1)
        report.case(impl=impl, measurement=what, bytes=model_bytes, ranks=options.ranks, gb_per_s=round(speed, 4),
                    of_raw=of_raw, of_dcp=of_dcp, extra_mib=extra_mib, **harness.spread(seconds, "s"))
        rows.append([impl, what, *harness.spread(seconds, "s").values(), speed,
                     "-" if of_raw is None else of_raw, "-" if of_dcp is None else of_dcp, extra_mib])
    if ("fsdp", "start_save") in found:
        held_up = harness.paired_ratio(found["fsdp", "start_save"][0], found["fsdp", "save"][0])
        report.case(impl="fsdp", measurement="held_up", bytes=model_bytes, ranks=options.ranks,
                    of_save=held_up["median_ratio"])
        report.note(f"\na save in the background holds a step up for {held_up['median_ratio']:.2f} of a save's time")
    report.note(f"\n{model_bytes:,} bytes over {options.ranks} ranks")
    report.table(["impl", "measurement", "median s", "p10", "p90", "GB/s", "of raw", "of DCP", "extra MiB"], rows)


def run(options, report):
    impls = IMPLS if options.impl == "all" else (options.impl,)
    harness.build(options, [harness.PROGRAM] if "fsdp" in impls else [])
    report.setting(shape=f"{options.mib // MATRIX_MIB} x [1024, 1024]", dtype="float32", mib=options.mib, world=options.ranks,
                   device="CPU, 1 thread a rank, gloo", time="wall clock", warm_up=options.warmup, repeats=options.repeats,
                   files_in=options.folder or "the build folder")
    with tempfile.TemporaryDirectory(prefix="fsdp-bench-", dir=options.folder or harness.build_dir()) as folder:
        model_bytes, found = measure(impls, folder, options)
    show(model_bytes, found, options, report)
