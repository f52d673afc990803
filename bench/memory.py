"""Bytes of live tensors at a step's peak and between steps, with and without prefetch, beside FSDP2, DDP and a lower bound.

The bound (memory_bound.py) is of steps that gather nothing ahead, from every operator of the plain model's own step. The
root's group is kept between forward and backward (reshard_after_forward=False). FSDP2 gathers one group ahead in backward.
A step is forward and backward. Every allocation of a CPU tensor is counted, those inside c10d's gloo too, whose threads make
the peak vary a little: the highest peak of all steps and ranks counts.
"""

import arguments
import conductor
import harness
from memory_bound import Group, Operator, lower_bound

IMPLS = ("fsdp", "python", "fsdp2", "ddp")  # python: the library's extension
QUICK = {"blocks": 2, "dim": 64, "hidden": 128, "vocabulary": 64, "ranks": 2, "prefetch": [1], "warmup": 1, "repeats": 1}


def add_options(parser):
    parser.add_argument("--model", choices=("mlp", "llama"), default="mlp", help="llama: not in C++ (default mlp)")
    parser.add_argument("--blocks", type=arguments.whole(1), default=8)
    parser.add_argument("--dim", type=arguments.whole(1), default=512)
    parser.add_argument("--hidden", type=arguments.whole(1), default=2048)
    parser.add_argument("--vocabulary", type=arguments.whole(1), default=512)
    parser.add_argument("--tokens", type=arguments.whole(1), default=16, help="a rank (default 16)")
    parser.add_argument("--ranks", type=arguments.whole(1), default=4)
    parser.add_argument("--prefetch", type=arguments.wholes(0), help="groups ahead, for fsdp and python (default 0,1,2)")
    parser.add_argument("--impl", choices=("all",) + IMPLS, default="all")
    parser.add_argument("--warmup", type=arguments.whole(0), default=3, help="steps before the measured ones (default 3)")
    parser.add_argument("--repeats", type=arguments.whole(1), default=5, help="measured steps (default 5)")


def modes(impls, options):
    """(impl, prefetch) pairs; torch's decide for themselves."""
    for distance in options.prefetch or [0, 1, 2]:
        for impl in impls:
            if impl in ("fsdp", "python"):
                yield impl, distance
    yield from ((impl, None) for impl in impls if impl in ("fsdp2", "ddp"))


def measure_plain(options):
    """What the bound needs of the model, which is the same in C++."""
    with conductor.Workers() as workers:
        worker = workers.start_world("plain", conductor.pytorch_command("memory.py"), 1)
        return worker.ask({"do": "plain", **request(options)})[0]


def request(options):
    return {"model": options.model, "blocks": options.blocks, "dim": options.dim, "hidden": options.hidden,
            "vocabulary": options.vocabulary, "tokens": options.tokens, "warmup": options.warmup, "repeats": options.repeats}


def measure(impl, prefetch, options):
    command = (conductor.fsdp_command(harness.build_dir(), "memory") if impl == "fsdp"
               else conductor.pytorch_command("memory.py"))
    with conductor.Workers() as workers:
        world = workers.start_world(impl, command, options.ranks)
        ranks = world.ask({"do": "sharded", "impl": impl, "prefetch": prefetch, **request(options)})
    return max(ranks, key=lambda reply: max(reply["peak_bytes"]))


def bound_of(plain, local_bytes):
    """local_bytes: of each group, on the rank that is meant. The last group is the root's."""
    root = len(local_bytes) - 1
    groups = [Group(whole, local, is_kept=index == root)
              for index, (whole, local) in enumerate(zip(plain["group_bytes"], local_bytes))]
    operators = [Operator(each["alive"], tuple(each["reads"]), tuple(map(tuple, each["gradients"])))
                 for each in plain["operators"]]
    return lower_bound(operators, groups)


def run(options, report):
    impls = IMPLS if options.impl == "all" else (options.impl,)
    if options.model == "llama":
        impls = tuple(impl for impl in impls if impl != "fsdp")
    harness.build(options, {*harness.targets_for(impls), harness.EXTENSION})
    report.setting(
        shape=f"{options.blocks} blocks of {options.dim} x {options.hidden}, {options.tokens} tokens a rank",
        dtype="float32", world=options.ranks, device="CPU, gloo", warm_up_steps=options.warmup,
        repeats=f"{options.repeats}, the highest peak of any rank")
    plain = measure_plain(options)
    rows = []
    for impl, prefetch in harness.progress(list(modes(impls, options)), "steps"):
        measured = measure(impl, prefetch, options)
        peak, between = max(measured["peak_bytes"]), measured["between_steps_bytes"]
        bound = bound_of(plain, measured["local_bytes"]) if impl != "ddp" else None
        ratio = round(peak / bound, 4) if bound else None
        over = round((peak - bound) / max(plain["group_bytes"][:-1]), 2) if bound else None
        report.case(impl=impl, prefetch=prefetch, ranks=options.ranks, peak_bytes=peak,
                    median_peak_bytes=harness.median(measured["peak_bytes"]), between_steps_bytes=between,
                    bound_bytes=bound, ratio=ratio, over_in_groups=over, parameter_bytes=sum(plain["group_bytes"]),
                    largest_group_bytes=max(plain["group_bytes"][:-1]), largest_at_peak=measured["largest_at_peak"],
                    largest_between_steps=measured.get("largest_between_steps"))
        report.note(f"  {impl}, prefetch {prefetch}: live at the peak: " + ", ".join(
            f"{entry['count']} x {entry['bytes']:,}" for entry in measured["largest_at_peak"][:8]))
        rows.append([impl, "its own" if prefetch is None else prefetch, peak, between, *(
            "-" if value is None else value for value in (bound, ratio, over))])
    report.table(["impl", "prefetch", "peak bytes", "between steps", "lower bound", "ratio", "over, in groups"], rows)
