"""Schedulers side by side on the simulated device: the library with its defaults, FSDP2, and DDP.

Each is its own, in Python over torch's process group: streams, events and the order of launches are real, and only time is
simulated (bench/extension/simulated_device). The host takes no time with any of them.
"""

from dataclasses import dataclass, field

import conductor

IMPLS = ("fsdp", "fsdp2", "ddp")
WARM_UP = 3  # steps: the library learns the order, DDP its buckets


@dataclass(frozen=True)
class Scheduled:
    """One step. Times in microseconds."""

    total_us: float
    peak_live_bytes: int  # of tensors, as the host makes and frees them
    slices: list = field(repr=False)  # what took time: name, bytes, alone_us, launched_us, begin_us, end_us


class Schedulers:
    def __init__(self, workers):
        # One process for all: to import torch takes as long as a hundred steps.
        self._worker = workers.start("schedulers", conductor.pytorch_command("simulated_overlap.py"))
        self._known = {}

    def step(self, impl, stack, passes={}, **options):
        """Of `stack`'s layers over its network. passes: reduce_passes and all_reduce_passes, where they are not a ring's.
        options: see bench/pytorch/simulated_overlap.py."""
        about = stack.request()
        network = {**stack.network.scaled(stack.scale).ring(), **passes}
        return self.step_of(impl, stack.world, about["layers"], network, stack.scale, separate=stack.separate, **options)

    def step_of(self, impl, world, layers, network, scale, separate=False, mixed=False, **options):
        """scale: what the bytes of tensors stand in for; `network` has it already."""
        request = {"do": "setup", "impl": impl, "world": world, "layers": layers, "scale": scale, "network": network,
                   "separate": separate, "mixed": mixed, **options}
        key = repr(request)
        if key not in self._known:
            self._worker.ask(request)
            (step,) = self._worker.ask({"do": "run", "warmup": WARM_UP, "steps": 1})["steps"]
            self._known[key] = Scheduled(step["total_us"], step["peak_live_bytes"] * scale, step["slices"])
        return self._known[key]
