"""Predicted step time and memory of Llama models on 8 to 16,384 H100 GPUs.

The real scheduler runs a step of every group of the model over a simulated network, on a virtual clock. Tensors are
stand-ins: each parameter has all of its rows, so that ranks share and pad them as they would, but only one column in
many, and every byte counts for as many, in the network's time and in memory. Nothing is predicted by a formula
but what the table of assumptions says. No prediction has been compared with a cluster.

Schemes: fsdp shards over all ranks and releases layers after forward; hsdp shards over a part of them and replicates
that; node keeps each layer sharded over the node's eight GPUs after forward (reshard_after_forward=8); budget names
the bytes of unsharded parameters instead (set_unsharded_byte_budget).
"""

import arguments
import conductor
import harness
import llamas
import networks

SCHEMES = ("fsdp", "hsdp", "node", "budget")
WORLDS = (8, 64, 512, 4096, 16384)
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
    ("tokens", "8,192 a GPU: 2 x 4,096 (7B), 1 x 8,192 (70B, 405B)",
     "context of Llama 2 and of Llama 3.1's first stage"),
    ("dtypes", "kept and reduced in float32, gathered in bfloat16", "MixedPrecisionPolicy"),
    ("activations", "every layer checkpointed, its backward three forwards", "arXiv 2205.05198 for the bytes"),
    ("optimizer", "Adam: 8 bytes an element of the shard; its time is not counted", "two float32 moments"),
)


def add_options(parser):
    parser.add_argument("--models", type=arguments.names(llamas.LLAMAS), help="default 7B,70B,405B")
    parser.add_argument("--worlds", type=arguments.wholes(1), help="default 8,64,512,4096,16384")
    parser.add_argument("--schemes", type=arguments.names(SCHEMES), default=list(SCHEMES), help=f"default {','.join(SCHEMES)}")
    parser.add_argument("--budget-gb", type=arguments.positive, default=24.0, help="of the scheme budget (default 24)")
    parser.add_argument("--achieved", type=arguments.positive, default=0.5, help="share of the peak FLOP/s (default 0.5)")
    parser.add_argument("--prefetch", type=arguments.whole(0), default=1)
    parser.add_argument("--reduce-buffers", type=arguments.whole(1), default=1)
    parser.add_argument("--separate-reductions", action="store_true")


def layers_of(model, options, factor):
    """Embedding, layers and head, each a group."""
    def group(shapes, flops, backward):
        forward_us = 1e6 * flops / (options.achieved * H100_BF16_FLOPS)
        return {"params": llamas.narrowed(shapes, factor), "forward_us": forward_us,
                "backward_us": backward * forward_us}

    embedding = group(model.vocabulary_shapes(), 0, 0)
    layer = group(model.layer_shapes(), model.layer_flops(), CHECKPOINTED_BACKWARD)
    head = group(model.vocabulary_shapes(), model.head_flops(), 2.0)
    return [embedding, *[layer] * model.layers, head]


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
    return {"do": "setup", "layers": layers_of(model, options, factor), "reshard": reshard,
            "prefetch": options.prefetch, "budget": budget, "separate": options.separate_reductions,
            "reduce_buffers": options.reduce_buffers, "mixed": True, "clock": "virtual", "stream": None,
            "replicas": replicas, "network": networks.infiniband(world).scaled(factor).request()}


def predict(worker, model, world, scheme, options):
    """One line; None where the scheme is another one at this size."""
    factor = model.stand_in_factor()
    asked = request(model, world, scheme, options, factor)
    if asked is None:
        return None
    worker.ask(asked)
    step = worker.ask({"do": "run", "warmup": 2, "steps": 1})["steps"][0]
    compute_us = sum(layer["forward_us"] + layer["backward_us"] for layer in asked["layers"])
    total_s = 1e-6 * step["total_us"]
    runtime = step["peak_live_bytes"] * factor
    # The moments lie beside the shard, which is kept in float32 as they are.
    memory = runtime + 2 * step["sharded_bytes"] * factor + model.activation_bytes()
    return {"model": model.name, "world": world, "scheme": scheme, "step_ms": round(1e3 * total_s, 2),
            "compute_ms": round(1e-3 * compute_us, 2), "exposed_ms": round(1e-3 * (step["total_us"] - compute_us), 2),
            "communication_ms": round(1e-3 * sum(t["alone_us"] for t in step["transfers"]), 2),
            "tokens_per_gpu_s": round(model.tokens / total_s, 1),
            "model_flops_percent": round(100 * model.model_flops() / total_s / H100_BF16_FLOPS, 1),
            "gathered_gb": round(step["gathered_bytes"] * factor / GIGABYTE, 1),
            "reduced_gb": round(step["reduced_bytes"] * factor / GIGABYTE, 1),
            "unsharded_gb": round(step["peak_unsharded_bytes"] * factor / GIGABYTE, 2),
            "runtime_gb": round(runtime / GIGABYTE, 2), "memory_gb": round(memory / GIGABYTE, 1),
            "fits": memory <= H100_BYTES, "stand_in_factor": factor}


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
    options.models = options.models or list(llamas.LLAMAS)
    options.worlds = options.worlds or list(WORLDS)
    check(options)
    harness.build(options, [harness.OVERLAP_PROGRAM])
    report.setting(models=options.models, prefetch=options.prefetch, reduce_buffers=options.reduce_buffers,
                   separate_reductions=options.separate_reductions, budget_gb=options.budget_gb, warm_up_steps=2,
                   device="simulated: H100 GPUs on NVLink and InfiniBand")
    report.note("\nassumptions")
    report.table(["what", "value", "source"],
                 [[what, value.format(share=options.achieved), source] for what, value, source in ASSUMPTIONS])
    rows = []
    shown = ["model", "world", "scheme", "step_ms", "compute_ms", "exposed_ms", "tokens_per_gpu_s",
             "model_flops_percent", "gathered_gb", "unsharded_gb", "memory_gb", "fits"]
    with conductor.Workers() as workers:
        worker = workers.start("scale", conductor.overlap_command(harness.build_dir()), timeout_s=900)
        for name in options.models:
            for world in options.worlds:
                for scheme in options.schemes:
                    line = predict(worker, llamas.LLAMAS[name], world, scheme, options)
                    if line is not None:
                        report.case(**line)
                        rows.append([line[key] if key != "fits" else ("yes" if line[key] else "no") for key in shown])
    if not rows:
        raise SystemExit("scale: nothing to predict: on so few GPUs these schemes are fsdp; take --schemes fsdp, or more "
                         "--worlds")
    report.note("\npredictions")
    report.table([key.replace("_", " ") for key in shown], rows)
