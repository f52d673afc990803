"""The Python package, FSDP2 and the plain model side by side: host work, optimizer, step, memory and start.

Five parts, each against an aim that is printed with it; `--parts` chooses. Ratios are medians of pairs that were
taken in turns, with p10 and p90 of the pairs. Timings on a busy machine differ by more than what
they are to show: instructions, counted by callgrind, decide then.

host: what sharding adds on the host for each group and step, over a network that is free (host_overhead).
optimizer: AdamW, fused and foreach, and clipping, on DTensor parameters and on local shards.
step: a step of a Llama of 51M parameters on two gloo ranks (gloo_step). memory: its peak of live tensors, and
what stays between steps.
start: fully_shard on each of 1,000 small modules, to_empty where they were on meta, and the first step.
"""

import argparse

import arguments
import callgrind
import conductor
import gloo_step
import harness
import host_overhead
import memory

PAIR = ("python", "fsdp2")
PHASES = ("fully_shard", "to_empty", "first_step")  # of start
# That Python with torch starts under callgrind takes more than a minute of a processor.
QUICK = {"repeats": 1, "modules": 10, "callgrind": False}
LLAMA = ["--blocks", "12", "--dim", "512", "--hidden", "2048", "--vocabulary", "512"]


def add_options(parser):
    parser.add_argument("--parts", default="all", help=f"comma-separated, of {', '.join(PARTS)}; default all")
    parser.add_argument("--repeats", type=arguments.whole(1), default=10, help="pairs of turns, of every part (default 10)")
    parser.add_argument("--modules", type=arguments.whole(1), default=1000, help="of start (default 1000)")
    parser.add_argument("--callgrind", action=argparse.BooleanOptionalAction, default=True,
                        help="count instructions, too (default; with --quick timings only)")


def llama(options):
    """Arguments for the Llama of step and memory; with --quick theirs."""
    return [] if options.quick else LLAMA


def host(options, report):
    """Aim: at most 60 k + 10 k x P instructions a group, and at most a ninth of FSDP2's at P = 9."""
    blocks = [] if options.quick else ["--blocks", "4,16"]
    part = harness.options_of(host_overhead, ["--repeats", str(options.repeats), *blocks], options.quick)
    part.no_callgrind = not options.callgrind
    for world in (8,) if options.quick else (8, 1024):
        part.worlds = [world]
        part.params = [9] if options.quick or world == 1024 else [1, 4, 9, 32]
        report.setting(part="host", params=part.params, world=world, blocks=part.blocks, device="CPU, 1 thread",
                       time="process CPU clock", dtype="float32", repeats=part.repeats)
        host_overhead.measure(PAIR, part, report)


def optimizer(options, report):
    """Aim: DTensors at most 1.0 of FSDP2's; local shards at most 1.1 of plain tensors."""
    shape = {"groups": 2 if options.quick else 50, "params": 9, "world": 8}
    sizes = (64,) if options.quick else (64, 8192)
    turns = options.repeats if options.quick else 10 * options.repeats
    command = conductor.pytorch_command("optimizer_step.py")
    per_param = count_optimizer(command, sizes, {**shape, "groups": 4}) if options.callgrind else {}
    for local_numel in sizes:
        report.setting(part="optimizer", **shape, elements_a_rank=local_numel, dtype="float32", device="CPU, 1 thread",
                       time="process CPU clock", repeats=turns)
        with conductor.Workers() as workers:
            started = {kind: workers.start(kind, command) for kind in KINDS}
            for kind, worker in started.items():
                worker.ask({"do": "setup", "kind": kind, "local_numel": local_numel, **shape})
            for what in WHATS:
                times = {kind: [] for kind in KINDS}
                for _ in range(turns):
                    for kind, worker in started.items():
                        times[kind].append(worker.ask({"do": "time", "what": what})["cpu_seconds"])
                report_optimizer(what, {**shape, "local_numel": local_numel}, times, per_param, report)


def count_optimizer(command, sizes, shape):
    """{label: instructions a parameter}."""
    def requests(kind, size):
        yield {"do": "setup", "kind": kind, "local_numel": size, **shape}
        for what in WHATS:
            yield {"do": "count", "what": what, "label": f"{what}-{kind}-{size}"}

    # A process for each: DTensor's caches take what one has put there for the other's, and compare meshes then.
    counts = callgrind.count_each(command, {f"{kind}, {size}": requests(kind, size) for kind in KINDS for size in sizes})
    return {label: count / (shape["groups"] * shape["params"]) for label, count in counts.items()}


KINDS = ("plain_tensors", "fsdp2", "python", "local_shards")
WHATS = {"fused": "fused AdamW", "foreach": "foreach AdamW", "clip": "clip_grad_norm_"}


def report_optimizer(what, shape, times, instructions, report):
    """instructions: a parameter, by label."""
    rows = []
    params, size = shape["groups"] * shape["params"], shape["local_numel"]
    for kind, samples in times.items():
        base = {"python": "fsdp2", "local_shards": "plain_tensors"}.get(kind)
        ratio = harness.paired_ratio(samples, times[base]) if base else {}
        mine = instructions.get(f"{what}-{kind}-{size}")
        of_base = mine / instructions[f"{what}-{base}-{size}"] if mine and base else None
        us = harness.spread(samples, "us_per_parameter", 1e6 / params)
        report.case(what=what, kind=kind, elements_a_rank=size, parameters=params, compared_with=base,
                    **ratio, instructions_per_parameter=mine and round(mine),
                    instructions_ratio=of_base and round(of_base, 4), **us)
        rows.append([kind, *us.values(), mine or "-", base or "", *(ratio.values() or [""] * 3), of_base or ""])
    report.note(f"\n{WHATS[what]}, microseconds a parameter of {size} elements a rank")
    report.table(["on", "median", "p10", "p90", "instructions", "against", "ratio", "p10", "p90", "of instructions"],
                 rows)


def step(options, report):
    """Aim: at most 0.65 of FSDP2's time."""
    asked = ["--model", "llama", "--repeats", str(options.repeats), *llama(options)]
    part = harness.options_of(gloo_step, asked, options.quick)
    gloo_step.measure((*PAIR, "plain"), part, report)


def peak_memory(options, report):
    """Aim: at most FSDP2's, at the peak and between steps, when gradients have been dropped."""
    part = harness.options_of(memory, ["--model", "llama", "--ranks", "2", "--tokens", "64", *llama(options)], options.quick)
    report.setting(part="memory", shape="the Llama of step", dtype="float32", world=2, device="CPU, gloo",
                   warm_up_steps=part.warmup, repeats=f"{part.repeats}, the highest peak of any rank")
    peaks, between = {}, {}
    for impl in PAIR:
        sharded = memory.measure(impl, None, part)
        peaks[impl], between[impl] = max(sharded["peak_bytes"]), sharded["between_steps_bytes"]
    rows = []
    for impl in PAIR:
        bytes_and_ratios = {"peak_bytes": peaks[impl], "peak_of_fsdp2": peaks[impl] / peaks["fsdp2"],
                            "between_steps_bytes": between[impl],
                            "between_steps_of_fsdp2": between[impl] / between["fsdp2"]}
        report.case(impl=impl, **bytes_and_ratios)
        rows.append([impl, *bytes_and_ratios.values()])
    report.note("\nbytes of live tensors: the peak of a step, and between steps, gradients dropped")
    report.table(["impl", "peak", "of FSDP2", "between steps", "of FSDP2"], rows)


def start(options, report):
    """Aim: at most an eighth of FSDP2's instructions, with the first step."""
    modules = options.modules
    command = conductor.pytorch_command("many_modules.py")
    request = {"impls": PAIR, "world": 8, "repeats": 1}
    report.setting(part="start", modules=modules, shape="Linear(8, 8)", dtype="float32", world=8,
                   device="CPU, 1 thread", time="process CPU clock, no garbage collection", repeats=options.repeats)
    with conductor.Workers() as workers:
        worker = workers.start("start", command)
        for device in ("cpu", "meta"):
            worker.ask({**request, "modules": 3, "device": device})
            times = worker.ask({**request, "modules": modules, "device": device, "repeats": options.repeats})
            report_start(device, modules, times, report)
    if not options.callgrind:
        return
    sizes = (2,) if options.quick else sorted({max(1, modules // 20), modules})  # a cost a module that grows would show
    # What is imported at the first use is not counted: that takes minutes.
    warm = [{"modules": 3, "device": device} for device in ("cpu", "meta")]
    counted = [{"modules": size, "device": device, "label": f"{size}-{device}"}
               for size in sizes for device in ("cpu", "meta")]
    counts = callgrind.count_each(command, {
        impl: [{**request, "impls": [impl], **each} for each in (*warm, *counted)] for impl in PAIR})
    report_start_counts(sizes, counts, report)


def report_start(device, modules, times, report):
    whole = {impl: [sum(phases) for phases in zip(*times[impl].values())] for impl in PAIR}
    ratio = harness.paired_ratio(whole["fsdp2"], whole["python"])
    rows = []
    for impl in PAIR:
        spreads = {phase: harness.spread(samples, "ms", 1e3)
                   for phase, samples in {**times[impl], "together": whole[impl]}.items()}
        report.case(measured="time", impl=impl, device=device, modules=modules,
                    times_faster=ratio if impl == "python" else None, **spreads)
        rows.append([impl, *(value for phase in spreads.values() for value in phase.values())])
    report.note(f"\n{modules} modules, {device}: milliseconds; FSDP2 takes {ratio['median_ratio']:.2f} times as long "
                f"(p10 {ratio['p10_ratio']:.2f}, p90 {ratio['p90_ratio']:.2f})")
    report.table(["impl", *(heading for phase in [*times["python"], "together"] for heading in (phase, "p10", "p90"))], rows)


def report_start_counts(sizes, counts, report):
    rows = []
    for device in ("cpu", "meta"):
        for size in sizes:
            whole = {}
            for impl in PAIR:
                of_phase = {phase: counts[label] / size for phase in PHASES
                            if (label := f"{size}-{device}-{impl}-{phase}") in counts}
                whole[impl] = sum(of_phase.values())
                times_ours = whole[impl] / whole["python"]
                report.case(measured="instructions", impl=impl, device=device, modules=size, times_ours=round(times_ours, 3),
                            **{f"{phase}_instructions_per_module": round(count) for phase, count in of_phase.items()})
                rows.append([impl, device, size, *(of_phase.get(phase, "-") for phase in PHASES), times_ours])
    report.note("\ninstructions a module")
    report.table(["impl", "device", "modules", *PHASES, "times ours"], rows)


PARTS = {"host": host, "optimizer": optimizer, "step": step, "memory": peak_memory, "start": start}


def run(options, report):
    parts = list(PARTS) if options.parts == "all" else options.parts.split(",")
    for name in parts:
        if name not in PARTS:
            raise SystemExit(f"compare_fsdp2: unknown part {name!r}; there are {', '.join(PARTS)}")
    if options.callgrind:
        callgrind.check_installed()
    harness.build(options, harness.targets_for(PAIR))
    for name in parts:
        report.part = name
        report.note(f"\n{name}: {PARTS[name].__doc__}")
        PARTS[name](options, report)
