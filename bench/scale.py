"""Predicted step time and memory of Llama models on 8 to 2,048 H100 GPUs, beside FSDP2's schedule and published figures.

The real scheduler runs a step of every group of the model over a simulated network, on a virtual clock. Tensors are
stand-ins: each parameter has all of its rows, so that ranks share and pad them as they would, but only one column in
many, and every byte counts for as many, in the network's time and in memory. Nothing is predicted by a formula
but what the table of assumptions says. More than 2,048 GPUs, a sequence each, make a batch that nobody trains with: there
other parallelism stands beside FSDP. --worlds takes them all the same.

Schemes: fsdp shards over all ranks and releases layers after forward; flat does so in the flat layout, where ranks
share elements instead of rows; hsdp shards over a part of them and replicates that; node keeps each layer sharded over the
node's eight GPUs after forward (reshard_after_forward=8); budget names the bytes of unsharded parameters instead
(set_unsharded_byte_budget); fsdp2 is fsdp by torch's FSDP2, its own streams and events on a device that exists only in time.

Beside published figures (published.py): of each row the first figure says how fast the GPU computes, and the other,
on more GPUs, is predicted from that.
"""

from itertools import product

import arguments
import conductor
import harness
import llamas
import networks
import overlap_schedulers
import published

MODELS = ("8B", "70B", "405B")
SCHEMES = ("fsdp", "flat", "hsdp", "node", "budget", "fsdp2")
WORLDS = (8, 64, 512, 2048)
QUICK = {"models": ["7B"], "worlds": [8, 64]}
GIGABYTE = 1e9
H100_BYTES = 80e9
H100_BF16_FLOPS = 989e12
CHECKPOINTED_BACKWARD = 3.0  # the forward again, and twice as much for the gradients

ASSUMPTIONS = (
    ("peak", "989 TFLOP/s, bfloat16 without sparsity", "NVIDIA H100 SXM5 datasheet"),
    ("achieved", "{share:.0%} of that while it computes",
     "assumed; 43% with all communication in arXiv 2407.21783, table 4"),
    ("memory", "80 GB a GPU", "NVIDIA H100 SXM5 datasheet"),
    ("within a node", "8 GPUs, 340 GB/s a rank (assumed), 3.4 us a ring step", "bench/networks.py"),
    ("between nodes", "47 GB/s a GPU, 14 us a ring step, 8.4 us a launch", "bench/networks.py"),
    ("collectives", "rings; all of a job's ranks at one speed", "NCCL also has trees for all-reduce"),
    ("tokens", "sequences of 8,192 (7B: 4,096); 2 a GPU of 7B and 8B, else 1",
     "context of Llama 3.1's first stage and of Llama 2"),
    ("dtypes", "kept and reduced in float32, gathered in bfloat16", "MixedPrecisionPolicy"),
    ("activations", "every layer checkpointed, its backward three forwards", "arXiv 2205.05198 for the bytes"),
    ("optimizer", "Adam: 8 bytes an element of the shard; its time is not counted", "two float32 moments"),
)


def add_options(parser):
    parser.add_argument("--models", type=arguments.names(llamas.LLAMAS), help=f"default {','.join(MODELS)}")
    parser.add_argument("--worlds", type=arguments.wholes(1), help=f"default {','.join(map(str, WORLDS))}")
    parser.add_argument("--schemes", type=arguments.names(SCHEMES), default=list(SCHEMES), help=f"default {','.join(SCHEMES)}")
    parser.add_argument("--budget-gb", type=arguments.positive, default=24.0, help="of the scheme budget (default 24)")
    parser.add_argument("--achieved", type=arguments.positive, default=0.5, help="share of the peak FLOP/s (default 0.5)")
    parser.add_argument("--prefetch", type=arguments.whole(0), default=1)
    parser.add_argument("--reduce-buffers", type=arguments.whole(1), default=1)
    parser.add_argument("--separate-reductions", action="store_true")


def layers_of(model, achieved, factor, backward=CHECKPOINTED_BACKWARD):
    """Embedding, layers and head, each a group. backward: of a layer, in forwards."""
    def group(shapes, flops, backward):
        forward_us = 1e6 * flops / (achieved * H100_BF16_FLOPS)
        return {"params": llamas.narrowed(shapes, factor), "forward_us": forward_us,
                "backward_us": backward * forward_us}

    embedding = group(model.vocabulary_shapes(), 0, 0)
    layer = group(model.layer_shapes(), model.layer_flops(), backward)
    head = group(model.vocabulary_shapes(), model.head_flops(), 2.0)
    return [embedding, *[layer] * model.layers, head]


def computing_us(layers):
    return sum(layer["forward_us"] + layer["backward_us"] for layer in layers)


def request(model, world, scheme, options, factor):
    """None: the scheme is another one at this size."""
    reshard, replicas, budget = None, 1, None
    if scheme == "hsdp":
        if world <= model.hybrid_shard or world % model.hybrid_shard:
            return None
        replicas = world // model.hybrid_shard
    elif scheme == "node":
        if world <= networks.GPUS_A_NODE:
            return None
        reshard = networks.GPUS_A_NODE
    elif scheme == "budget":
        budget = int(options.budget_gb * GIGABYTE / factor)
    return {"do": "setup", "layers": layers_of(model, options.achieved, factor), "reshard": reshard,
            "prefetch": options.prefetch, "budget": budget, "separate": options.separate_reductions,
            "reduce_buffers": options.reduce_buffers, "mixed": True, "flat": scheme == "flat", "clock": "virtual",
            "stream": None, "replicas": replicas, "network": networks.infiniband(world).scaled(factor).request()}


def sharded_bytes(layers, world):
    """Of one rank, in float32: of each parameter as many rows as any rank has."""
    return sum(4 * -(-rows // world) * columns for layer in layers for rows, columns in layer["params"])


def fsdp2_step(schedulers, world, layers, factor):
    """In the core's words."""
    network = networks.infiniband(world).scaled(factor).ring()
    step = schedulers.step_of("fsdp2", world, layers, network, factor, mixed=True)
    moved = {name: [each for each in step.slices if each["name"].startswith(name)]
             for name in ("all_gather", "reduce_scatter")}
    return {"total_us": step.total_us, "peak_live_bytes": step.peak_live_bytes // factor,
            "sharded_bytes": sharded_bytes(layers, world), "transfers": [each for all_ in moved.values() for each in all_],
            "gathered_bytes": sum(each["bytes"] for each in moved["all_gather"]),
            "reduced_bytes": sum(each["bytes"] for each in moved["reduce_scatter"]), "peak_unsharded_bytes": None}


class Predictor:
    """Asks the workers for one step after the other."""

    def __init__(self, options, workers):
        self.options = options
        self.core = workers.start("scale", conductor.overlap_command(harness.build_dir()), timeout_s=900)
        self.schedulers = overlap_schedulers.Schedulers(workers) if "fsdp2" in options.schemes else None

    def step(self, asked):
        self.core.ask(asked)
        return self.core.ask({"do": "run", "warmup": 2, "steps": 1})["steps"][0]

    def line(self, model, world, scheme):
        """None where the scheme is another one at this size."""
        factor = model.stand_in_factor()
        asked = request(model, world, scheme, self.options, factor)
        if asked is None:
            return None
        step = (fsdp2_step(self.schedulers, world, asked["layers"], factor) if scheme == "fsdp2"
                else self.step(asked))
        return line_of(model, world, scheme, step, computing_us(asked["layers"]), factor)


def line_of(model, world, scheme, step, compute_us, factor):
    def gb(size, digits):
        return None if size is None else round(size * factor / GIGABYTE, digits)

    total_s = 1e-6 * step["total_us"]
    # The moments lie beside the shard, which is kept in float32 as they are.
    memory = (step["peak_live_bytes"] + 2 * step["sharded_bytes"]) * factor + model.activation_bytes()
    return {"model": model.name, "world": world, "scheme": scheme, "tokens_a_gpu": model.tokens,
            "global_tokens": world * model.tokens, "step_ms": round(1e3 * total_s, 2),
            "compute_ms": round(1e-3 * compute_us, 2), "exposed_ms": round(1e-3 * (step["total_us"] - compute_us), 2),
            "communication_ms": round(1e-3 * sum(t["alone_us"] for t in step["transfers"]), 2),
            "tokens_per_gpu_s": round(model.tokens / total_s, 1),
            "model_flops_percent": round(100 * model.model_flops() / total_s / H100_BF16_FLOPS, 1),
            "gathered_gb": gb(step["gathered_bytes"], 1), "reduced_gb": gb(step["reduced_bytes"], 1),
            "unsharded_gb": gb(step["peak_unsharded_bytes"], 2), "runtime_gb": gb(step["peak_live_bytes"], 2),
            "memory_gb": round(memory / GIGABYTE, 1), "fits": memory <= H100_BYTES, "stand_in_factor": factor}


def check(options):
    for world in options.worlds:
        if world % networks.GPUS_A_NODE:
            raise SystemExit(f"scale: --worlds: expected whole nodes of {networks.GPUS_A_NODE} GPUs, found {world}")
    if options.achieved > 1:
        raise SystemExit(f"scale: --achieved: expected a share of the peak, 1 at most, found {options.achieved:g}")
    if "budget" not in options.schemes:
        return
    for name in options.models:
        model = llamas.LLAMAS[name]
        least = 2 * max(llamas.elements(shapes) for shapes in (model.layer_shapes(), model.vocabulary_shapes())) / GIGABYTE
        if options.budget_gb < least:
            raise SystemExit(f"scale: --budget-gb: expected {least:.2g} or more, which the largest layer of {name} takes, "
                             f"found {options.budget_gb:g}")


def run(options, report):
    options.models = options.models or list(MODELS)
    options.worlds = options.worlds or list(WORLDS)
    check(options)
    if "fsdp2" in options.schemes and not harness.has_target(harness.SIMULATED_DEVICE):
        raise SystemExit("scale: the scheme fsdp2 needs a build with Python; leave it out of --schemes")
    harness.build(options, [harness.OVERLAP_PROGRAM, *(
        [harness.SIMULATED_DEVICE, *harness.PACKAGE] if "fsdp2" in options.schemes else [])])
    report.setting(models=options.models, prefetch=options.prefetch, reduce_buffers=options.reduce_buffers,
                   separate_reductions=options.separate_reductions, budget_gb=options.budget_gb, warm_up_steps=2,
                   device="simulated: H100 GPUs on NVLink and InfiniBand")
    report.note("\nassumptions")
    report.table(["what", "value", "source"],
                 [[what, value.format(share=options.achieved), source] for what, value, source in ASSUMPTIONS])
    rows = []
    shown = ["model", "world", "scheme", "tokens_a_gpu", "global_tokens", "step_ms", "compute_ms", "exposed_ms",
             "tokens_per_gpu_s", "model_flops_percent", "gathered_gb", "unsharded_gb", "memory_gb", "fits"]
    with conductor.Workers() as workers:
        predictor = Predictor(options, workers)
        cases = list(product(options.models, options.worlds, options.schemes))
        for name, world, scheme in harness.progress(cases, "predictions"):
            line = predictor.line(llamas.LLAMAS[name], world, scheme)
            if line is not None:
                report.case(**line)
                rows.append([_shown(line[key]) for key in shown])
        if not rows:
            raise SystemExit("scale: nothing to predict: on so few GPUs these schemes are fsdp; take --schemes fsdp, or more "
                             "--worlds")
        report.note("\npredictions")
        report.table([key.replace("_", " ") for key in shown], rows)
        compare(predictor, report)


def _shown(value):
    if value is None:
        return "-"
    return ("no", "yes")[value] if isinstance(value, bool) else value


def compare(predictor, report):
    """With what others have published, of FSDP2. Both schedules are the same on the GPUs that say how fast one computes."""
    rows = []
    for row in published.ROWS:
        model = llamas.LLAMAS[row.model]
        factor = model.stand_in_factor()

        def tokens_per_s(world, achieved, by_fsdp2=False):
            layers = layers_of(model, achieved, factor, row.backward)
            step = (fsdp2_step(predictor.schedulers, world, layers, factor) if by_fsdp2
                    else predictor.step({**request(model, world, "fsdp", predictor.options, factor), "layers": layers}))
            return 1e6 * model.tokens / step["total_us"]

        achieved = published.share_that_gives(row.found, lambda share: tokens_per_s(row.found_on, share))
        predicted = tokens_per_s(row.predicted_on, achieved)
        by_fsdp2 = tokens_per_s(row.predicted_on, achieved, by_fsdp2=True) if predictor.schedulers else None
        error = 100 * ((by_fsdp2 or predicted) / row.published - 1)
        report.case(comparison=row.name, model=row.model, source=published.SOURCE, found_on=row.found_on, found=row.found,
                    achieved_percent=round(100 * achieved, 1), world=row.predicted_on, published=row.published,
                    predicted=round(predicted), predicted_by_fsdp2=by_fsdp2 and round(by_fsdp2),
                    error_percent=round(error, 1))
        rows.append([row.name, row.found_on, row.found, f"{achieved:.1%}", row.predicted_on, row.published,
                     round(predicted), _shown(by_fsdp2 and round(by_fsdp2)), f"{error:+.1f}"])
    report.note(f"\nbeside published figures, tokens a GPU and second ({published.SOURCE})")
    report.table(["what", "GPUs", "published", "so computing", "GPUs", "published", "predicted", "FSDP2's schedule",
                  "off by %"], rows)
