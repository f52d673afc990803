"""Instructions of LibTorch's own optimizers and clipping on DTensors, beside ordinary tensors.

Parameters of 16x16 float32 at one rank: a piece is the whole, so what differs is what a DTensor costs. Instructions are
counted by callgrind over steps after three that warm up, with one thread.
"""

import arguments
import callgrind
import conductor
import harness

STEPS = ("AdamW", "Adam", "SGD", "foreach_adamw", "fused_adamw", "clip_grad_norm_")
QUICK = {"parameters": 4, "steps": 2}


def add_options(parser):
    parser.add_argument("--parameters", type=arguments.whole(1), default=20, help="default 20")
    parser.add_argument("--steps", type=arguments.whole(1), default=20, help="that are counted (default 20)")


def run(options, report):
    harness.build(options, harness.targets_for(("fsdp",)))
    callgrind.check_installed()
    report.setting(shape="16x16", dtype="float32", parameters=options.parameters, world=1, device="CPU, 1 thread",
                   steps=options.steps)
    requests = [{"step": step, "sharded": sharded, "parameters": options.parameters, "steps": options.steps,
                 "label": f"{step}/{'dtensor' if sharded else 'plain'}"}
                for step in STEPS for sharded in (False, True)]
    counts = callgrind.count("fsdp under callgrind", conductor.fsdp_command(harness.build_dir(), "dtensor_step"), requests)
    rows = []
    for step in STEPS:
        plain, dtensor = (counts[f"{step}/{kind}"] / options.steps / options.parameters for kind in ("plain", "dtensor"))
        report.case(step=step, plain_instructions=round(plain), dtensor_instructions=round(dtensor),
                    ratio=round(dtensor / plain, 3))
        rows.append([step, plain, dtensor, dtensor / plain])
    report.note("\ninstructions a step and parameter")
    report.table(["step", "plain", "DTensor", "ratio"], rows)
