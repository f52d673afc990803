"""What sharding adds on the host per block and step when the network is free, beside FSDP2.

A step is forward and backward and the dropping of the gradients, without an optimizer. The model is a chain of blocks
of P parameters, each used by one cheap operator; the plain model runs the same operators on the same shapes and is
subtracted. Collectives move nothing and are done at once on both sides. Instructions are counted by callgrind over
steps after the warm-up, with one thread, so they hardly change from run to run; CPU time is the process's own.
"""

from concurrent.futures import ThreadPoolExecutor
from itertools import product

import arguments
import callgrind
import conductor
import harness

IMPLS = ("fsdp", "python", "fsdp2")  # the library, its Python extension, torch's
QUICK = {"blocks": [1, 2], "params": [2], "worlds": [8], "warmup": 1, "steps": 1, "repeats": 1}
# For orientation, instructions a block: FSDP2 of torch 2.15 was found to add 2.37 M + 0.233 M x P; the aim here is 30 k + 6 k x P in
# C++, and 60 k + 10 k x P in Python.


def add_options(parser):
    parser.add_argument("--blocks", type=arguments.wholes(1), help="default 4,16; the slope is fitted over these")
    parser.add_argument("--params", type=arguments.wholes(1), help="parameters a block; default 1,4,9,32")
    parser.add_argument("--worlds", type=arguments.wholes(1), help="default 8, and 1024 with 9 parameters a block")
    parser.add_argument("--full", action="store_true",
                        help="blocks 4,16,32,64; params 1,4,9,32; worlds 8,1024 (about a quarter of an hour)")
    parser.add_argument("--operator", choices=("mul", "linear"), default="mul",
                        help="how a block uses a parameter: x * w (default), or x + linear(x, w)")
    parser.add_argument("--impl", choices=("all",) + IMPLS, default="all")
    parser.add_argument("--warmup", type=arguments.whole(0), default=3, help="steps before the measured ones (default 3)")
    parser.add_argument("--steps", type=arguments.whole(1), default=3, help="steps that are counted and timed (default 3)")
    parser.add_argument("--repeats", type=arguments.whole(1), default=5, help="timed rounds over all cases (default 5)")
    parser.add_argument("--no-callgrind", action="store_true", help="CPU time only")


def shapes(options):
    """The (params, world) pairs and the block counts."""
    if options.full:
        return list(product((1, 4, 9, 32), (8, 1024))), [4, 16, 32, 64]
    blocks = options.blocks or [4, 16]
    if options.worlds or options.params:
        return list(product(options.params or [1, 4, 9, 32], options.worlds or [8])), blocks
    return [(params, 8) for params in (1, 4, 9, 32)] + [(9, 1024)], blocks


def requests(impl, options):
    pairs, blocks = shapes(options)
    for (params, world), count, sharded in product(pairs, blocks, (False, True)):
        yield {
            "impl": impl, "blocks": count, "params_per_block": params, "world": world, "sharded": sharded,
            "operator": options.operator, "warmup": options.warmup, "steps": options.steps,
            "label": f"blocks{count}-params{params}-world{world}-{'sharded' if sharded else 'plain'}",
        }


def command(impl):
    if impl == "fsdp":
        return conductor.fsdp_command(harness.build_dir(), "host_overhead")
    return conductor.pytorch_command("host_overhead.py")


def count_instructions(impl, options):
    """{label: instructions a step}."""
    counts = callgrind.count(f"{impl} under callgrind", command(impl), requests(impl, options))
    return {label: count / options.steps for label, count in counts.items()}


def time_steps(impls, options):
    """{impl: {label: [CPU seconds of each step]}}, the implementations taking turns."""
    times = {impl: {request["label"]: [] for request in requests(impl, options)} for impl in impls}
    with conductor.Workers() as workers:
        started = {impl: workers.start(impl, command(impl)) for impl in impls}
        for _ in harness.progress(range(options.repeats), "turns"):
            for turn in zip(*(requests(impl, options) for impl in impls)):
                for impl, request in zip(impls, turn):
                    times[impl][request["label"]] += started[impl].ask(request)["cpu_seconds"]
    return times


def fit(points):
    """Slope and intercept of the least-squares line through (blocks, value)."""
    if len(points) == 1:
        return points[0][1] / points[0][0], 0.0
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    slope = (sum((x - mean_x) * (y - mean_y) for x, y in points)
             / sum((x - mean_x) ** 2 for x, _ in points))
    return slope, mean_y - slope * mean_x


def label(blocks, params, world, kind):
    return f"blocks{blocks}-params{params}-world{world}-{kind}"


def added(values, blocks, params, world):
    """Sharded minus plain, a step."""
    return values[label(blocks, params, world, "sharded")] - values[label(blocks, params, world, "plain")]


def report_impl(impl, options, report, instructions, times):
    rows = []
    pairs, block_counts = shapes(options)
    medians = {key: harness.median(samples) * 1e6 for key, samples in times.items()}
    for params, world in pairs:
        time_line = fit([(b, added(medians, b, params, world)) for b in block_counts])
        instruction_line = (None, None)
        if instructions:
            instruction_line = fit([(b, added(instructions, b, params, world)) for b in block_counts])
        for blocks in block_counts:
            add_instructions = added(instructions, blocks, params, world) / blocks if instructions else None
            report.case(
                impl=impl, blocks=blocks, params_per_block=params, world=world, operator=options.operator,
                added_instructions_per_block=add_instructions and round(add_instructions),
                added_us_per_block=round(added(medians, blocks, params, world) / blocks, 3),
                slope_instructions_per_block=instructions and round(instruction_line[0]),
                intercept_instructions=instructions and round(instruction_line[1]),
                slope_us_per_block=round(time_line[0], 3), intercept_us=round(time_line[1], 3),
                sharded_step=harness.spread(times[label(blocks, params, world, "sharded")], "us", 1e6),
                plain_step=harness.spread(times[label(blocks, params, world, "plain")], "us", 1e6))
        rows.append([impl, params, world, instruction_line[0] or "-", instruction_line[1] or "-",
                     time_line[0], time_line[1]])
    return rows


def report_ratios(rows, report):
    """How many times more FSDP2 adds. Returns the rows for people."""
    theirs = {(row[1], row[2]): row for row in rows if row[0] == "fsdp2"}
    shown = []
    for impl, params, world, instructions, _, us, _ in rows:
        fsdp2 = theirs.get((params, world))
        if impl == "fsdp2" or not fsdp2:
            continue
        of_instructions = None if "-" in (fsdp2[3], instructions) else fsdp2[3] / instructions
        report.case(impl=impl, params_per_block=params, world=world, times_fsdp2_instructions=of_instructions,
                    times_fsdp2_us=fsdp2[5] / us)
        shown.append([f"fsdp2 / {impl}", params, world, of_instructions or "-", "", fsdp2[5] / us, ""])
    return shown


def run(options, report):
    impls = IMPLS if options.impl == "all" else (options.impl,)
    harness.build(options, harness.targets_for(impls))
    if not options.no_callgrind:
        callgrind.check_installed()
    pairs, blocks = shapes(options)
    size = "w of [world]" if options.operator == "mul" else "w of [world, 8]"
    report.setting(shape=size, dtype="float32", params_and_world=pairs, blocks=blocks, device="CPU, 1 thread",
                   time="process CPU clock", warm_up_steps=options.warmup, steps=options.steps,
                   repeats=options.repeats)
    measure(impls, options, report)


def measure(impls, options, report):
    """Adds the cases to the report and shows the table."""
    times = time_steps(impls, options)
    counts = {}
    if not options.no_callgrind:
        # That torch starts under callgrind takes half a minute of a processor, and in Python twice as long.
        counted = impls[:1] if options.quick else impls
        # Side by side: the counts do not depend on what else runs.
        with ThreadPoolExecutor(len(counted)) as pool:
            counts = dict(zip(counted, pool.map(lambda impl: count_instructions(impl, options), counted)))
    rows = []
    for impl in impls:
        rows += report_impl(impl, options, report, counts.get(impl), times[impl])
    rows += report_ratios(rows, report)
    report.note("\nadded a step: per block (slope) and once (intercept)")
    report.table(["impl", "params", "world", "instructions/block", "instructions once", "us/block", "us once"], rows)
