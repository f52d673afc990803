"""Peak bytes of live tensors in a step against what must be live, with and without prefetch, beside FSDP2.

What must be live: the local shards and their gradients; the root's group, which is kept on purpose, with its pending
gradients; the largest other group with its gradients; the plain model's activations and temporaries, measured in the
same process; each group that is prefetched, once; and for FSDP2, whose backend cannot send from place to place, one
buffer to pack a group. FSDP2 prefetches one group. A step is forward and backward. Every allocation of a CPU tensor
is counted, those inside c10d's gloo too, whose threads make the peak vary a little: the highest peak of all steps
and ranks counts.
"""

import arguments
import conductor
import harness

IMPLS = ("fsdp", "python", "fsdp2")  # python: the library's extension
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
    """(impl, prefetch) pairs; FSDP2 decides for itself."""
    for distance in options.prefetch or [0, 1, 2]:
        for impl in impls:
            if impl != "fsdp2":
                yield impl, distance
    if "fsdp2" in impls:
        yield "fsdp2", None


def measure(impl, prefetch, options):
    command = (conductor.fsdp_command(harness.build_dir(), "memory") if impl == "fsdp"
               else conductor.pytorch_command("memory.py"))
    request = {"impl": impl, "model": options.model, "blocks": options.blocks, "dim": options.dim,
               "hidden": options.hidden, "vocabulary": options.vocabulary, "tokens": options.tokens,
               "prefetch": prefetch, "warmup": options.warmup, "repeats": options.repeats}
    with conductor.Workers() as workers:
        world = workers.start_world(impl, command, options.ranks)
        plain = world.ask({"do": "plain", **request})[0]
        ranks = world.ask({"do": "sharded", **request})
    return plain, max(ranks, key=lambda reply: max(reply["peak_bytes"]))


def must_be_live(impl, prefetch, plain, sharded):
    """The parts of the sum, in bytes."""
    packs = impl == "fsdp2"
    ahead = 1 if prefetch is None else prefetch
    return {
        "shards": sharded["local_bytes"],
        "shard_gradients": sharded["local_bytes"],
        "root": plain["root_bytes"],
        "root_gradients": plain["root_bytes"],
        "group": plain["block_bytes"],
        "group_gradients": plain["block_bytes"],
        "packing": plain["block_bytes"] if packs else 0,
        "prefetched": ahead * plain["block_bytes"],
        "activations": plain["activation_bytes"],
    }


def run(options, report):
    impls = IMPLS if options.impl == "all" else (options.impl,)
    if options.model == "llama":
        impls = tuple(impl for impl in impls if impl != "fsdp")
    harness.build(options, harness.targets_for(impls))
    report.setting(
        shape=f"{options.blocks} blocks of {options.dim} x {options.hidden}, {options.tokens} tokens a rank",
        dtype="float32", world=options.ranks, device="CPU, gloo", warm_up_steps=options.warmup,
        repeats=f"{options.repeats}, the highest peak of any rank")
    rows = []
    for impl, prefetch in modes(impls, options):
        plain, sharded = measure(impl, prefetch, options)
        parts = must_be_live(impl, prefetch, plain, sharded)
        must, peak = sum(parts.values()), max(sharded["peak_bytes"])
        report.case(impl=impl, prefetch=prefetch, ranks=options.ranks, peak_bytes=peak,
                    median_peak_bytes=harness.median(sharded["peak_bytes"]), must_be_live_bytes=must,
                    ratio=round(peak / must, 4),
                    between_steps_bytes=sharded["between_steps_bytes"],
                    parameter_bytes=plain["parameter_bytes"], must_be_live=parts,
                    largest_at_peak=sharded["largest_at_peak"],
                    largest_between_steps=sharded.get("largest_between_steps"))
        report.note(f"  {impl}, prefetch {prefetch}: must be live, bytes: " + ", ".join(
            f"{part.replace('_', ' ')} {size:,}" for part, size in parts.items()))
        report.note("    live at the peak: " + ", ".join(
            f"{entry['count']} x {entry['bytes']:,}" for entry in sharded["largest_at_peak"][:8]))
        ahead = "its own" if prefetch is None else prefetch
        over = (peak - must) / plain["block_bytes"]
        rows.append([impl, ahead, peak, must, peak / must, over, sharded["between_steps_bytes"]])
    report.table(["impl", "prefetch", "peak bytes", "must be live", "ratio", "over, in groups", "between steps"],
                 rows)
