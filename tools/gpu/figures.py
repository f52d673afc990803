"""The table of step times: a part for each shape, world and way of running, ordered by what they tell.

Each runs bench/cuda_step.py, which takes the plain model, FSDP2, the package and the C++ library in turns, from 128 to
8,192 tokens, and writes what it had no time for.
"""

import sys
from pathlib import Path

from parts import Part

ROOT = Path(__file__).resolve().parents[2]
TOKENS = "128,512,2048,8192"
STEP = "bench/fsdp_bench_cuda_step"


def cell(device, name, limit_s, shows, *arguments, needs=()):
    if device == "cpu":
        arguments = (*arguments, "--device", "cpu", "--tokens", "128", "--repeats", "2", "--steps", "1")
    else:
        needs = ("gpu", *needs)
    command = (sys.executable, str(ROOT / "bench" / "run.py"), "cuda_step", "--no-build", "--tokens", TOKENS, *arguments,
               "--limit", "{limit}", "--out", "{out}")
    return Part(name, command, limit_s, needs=("built:bindings/fsdp/_api.py", f"built:{STEP}", *needs), shows=shows)


def parts(device):
    """GiB of memory: the model's parameters, gradients and states, of all that are there at once, and activations."""
    def one(*arguments, **more):
        return cell(device, *arguments, **more)

    return [
        one("1.2B_fake8", 150, "host time and step time with the sizes of 8 ranks", "--worlds", "fake"),
        one("1.2B_one", 150, "a rank alone, with AdamW", "--worlds", "one"),
        one("1.2B_fake64", 120, "the sizes of 64 ranks", "--worlds", "fake", "--ranks", "64"),
        one("8B_fake8", 240, "a large model with the sizes of 8 ranks", "--worlds", "fake", "--shape", "8B",
            needs=("memory:70",)),
        one("1.2B_fake8_compiled", 240, "the same under torch.compile", "--worlds", "fake", "--compile",
            needs=("memory:30",)),
        one("8B_fake64", 240, "a large model with the sizes of 64 ranks", "--worlds", "fake", "--ranks", "64",
            "--shape", "8B", needs=("memory:70",)),
        one("1.2B_one_compiled", 240, "a rank alone, under torch.compile", "--worlds", "one", "--compile",
            needs=("memory:30",)),
        one("1.2B_nccl", 150, "two ranks with a GPU each: kernels and copies around each collective", "--worlds", "nccl",
            needs=("gpus:2", "memory:60")),
        one("8B_one", 240, "a large model alone, each kind by itself", "--worlds", "one", "--shape", "8B", "--alone",
            "--no-optimizer", needs=("memory:70",)),
        one("8B_fake8_compiled", 300, "a large model under torch.compile", "--worlds", "fake", "--shape", "8B", "--compile",
            needs=("memory:70",)),
    ]
