"""A training step of a 51M-parameter model on two gloo ranks: ours, FSDP2, DDP, and one plain process.

The batch is small, so that communication dominates. All implementations stay alive and take turns, so that what else
the machine does hits them alike. A step is forward, backward and plain SGD; its time is the slower rank's.

`_kept`: parameters stay after forward (reshard_after_forward=False), which are the bytes on the wire that DDP has, too. FSDP2's
time, which others are divided by, is that of the same kind.
"""

import arguments
import conductor
import harness

KEPT = "_kept"
CPP_IMPLS = ("fsdp", "fsdp_kept", "plain_cpp")
# python: the library's extension
IMPLS = ("fsdp", "fsdp_kept", "python", "python_kept", "fsdp2", "fsdp2_kept", "ddp", "plain", "plain_cpp")
QUICK = {"blocks": 2, "dim": 64, "hidden": 128, "vocabulary": 64, "warmup": 1, "steps": 1, "repeats": 2}


def add_options(parser):
    parser.add_argument("--impl", default="all", help=f"comma-separated, of {', '.join(IMPLS)}; default all")
    parser.add_argument("--model", choices=("mlp", "llama"), default="mlp",
                        help="llama: not in C++ (default mlp)")
    parser.add_argument("--blocks", type=arguments.whole(1), default=24)
    parser.add_argument("--dim", type=arguments.whole(1), default=512)
    parser.add_argument("--hidden", type=arguments.whole(1), default=2048)
    parser.add_argument("--vocabulary", type=arguments.whole(1), default=512)
    parser.add_argument("--tokens", type=arguments.whole(1), default=64, help="a rank and step (default 64)")
    parser.add_argument("--ranks", type=arguments.whole(1), default=2)
    parser.add_argument("--warmup", type=arguments.whole(0), default=3, help="steps before the measured ones (default 3)")
    parser.add_argument("--steps", type=arguments.whole(1), default=2, help="steps a turn (default 2)")
    parser.add_argument("--repeats", type=arguments.whole(1), default=8, help="turns (default 8)")


def chosen(options):
    impls = IMPLS if options.impl == "all" else tuple(options.impl.split(","))
    if options.model == "llama":
        impls = tuple(impl for impl in impls if impl not in CPP_IMPLS)
    unknown = [impl for impl in impls if impl not in IMPLS]
    if unknown:
        raise SystemExit(f"gloo_step: unknown --impl {unknown[0]!r}; there are {', '.join(IMPLS)}")
    return impls


def start(workers, impl, options):
    command = (conductor.fsdp_command(harness.build_dir(), "gloo_step") if impl in CPP_IMPLS
               else conductor.pytorch_command("gloo_step.py"))
    ranks = 1 if impl.startswith("plain") else options.ranks
    world = workers.start_world(impl, command, ranks)
    about = world.ask({"do": "setup", "impl": impl.removesuffix(KEPT), "kept": impl.endswith(KEPT), "model": options.model,
                       "blocks": options.blocks, "dim": options.dim, "hidden": options.hidden,
                       "vocabulary": options.vocabulary, "tokens": options.tokens})
    world.ask({"do": "run", "steps": options.warmup})
    return world, about[0]["parameters"]


def slower_rank(replies):
    """Each step's time on the slower rank."""
    return [max(times) for times in zip(*(reply["seconds"] for reply in replies))]


def run(options, report):
    impls = chosen(options)
    harness.build(options, ([harness.PROGRAM] if set(CPP_IMPLS) & set(impls) else [])
                  + (harness.PACKAGE if {"python", "python_kept"} & set(impls) else []))
    measure(impls, options, report)


def measure(impls, options, report):
    """Adds the cases to the report and shows the table."""
    times = {impl: [] for impl in impls}
    with conductor.Workers() as workers:
        started = {impl: start(workers, impl, options) for impl in impls}
        parameters = next(iter(started.values()))[1]
        report.setting(
            parameters=f"{parameters:,}", shape=f"{options.model}, {options.blocks} blocks of {options.dim} x "
            f"{options.hidden}, {options.tokens} tokens a rank", dtype="float32", bytes=f"{4 * parameters:,}",
            world=options.ranks, device="CPU, 1 thread a rank, gloo", time="wall clock", warm_up_steps=options.warmup,
            repeats=options.repeats * options.steps)
        for _ in harness.progress(range(options.repeats), "turns"):
            for impl in impls:
                times[impl] += slower_rank(started[impl][0].ask({"do": "run", "steps": options.steps}))
    rows = []
    for impl in impls:
        seconds = harness.spread(times[impl], "s")
        fsdp2 = "fsdp2_kept" if impl.endswith(KEPT) and "fsdp2_kept" in impls else "fsdp2"
        ratio = harness.paired_ratio(times[impl], times[fsdp2]) if fsdp2 in impls else {}
        of_ddp = harness.paired_ratio(times[impl], times["ddp"])["median_ratio"] if "ddp" in impls else None
        report.case(impl=impl, model=options.model, ranks=1 if impl.startswith("plain") else options.ranks,
                    parameters=parameters, tokens=options.tokens, of_fsdp2=ratio.get("median_ratio"), of_ddp=of_ddp, **ratio,
                    **seconds)
        rows.append([impl, *seconds.values(), *(ratio.values() or ["-"] * 3), "-" if of_ddp is None else of_ddp])
    report.note("\nseconds a step")
    report.table(["impl", "median", "p10", "p90", "of FSDP2", "p10", "p90", "of DDP"], rows)
