"""The worker of cuda_step: training steps of a Llama in bfloat16 on a GPU, sharded by the package, by FSDP2, or plain.

`setup` joins a world: fake (of so many ranks, this process the first), or as the conductor's environment says. `memory`
makes a model and measures its steps alone on the device. `make` makes models of all kinds, `warm` runs steps of one of
them, `time` and `profile` measure it, `summary` reads the C++ library's trace, `drop` lets go of all.
"""

import contextlib
import gc
import os
import time
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import kernel_timeline
import models
import worker

LONGEST_SEQUENCE = 2048
# By the names that FSDP2 calls them by, of one version of torch or another.
COLLECTIVES = {"all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor", "reduce_scatter_single", "all_reduce"}
TINY = {"blocks": 1, "dim": 64, "hidden": 128, "vocabulary": 128, "heads": 2}


class Subject:
    """One kind of model with its optimizer, and its step."""

    def __init__(self, impl, place, shape):
        torch.manual_seed(0)
        with torch.device(place.device):
            self.model = models.LlamaModel(**shape).bfloat16()
        if place.compiles:
            for block in self.model.blocks:
                block.compile(dynamic=False)
        if impl != "plain":
            models.shard(self.model, place.mesh, worker.fully_shard_of(impl))
        # What a fake world leaves as gradients is no number to train with.
        has_none = place.is_fake or not place.optimizes
        self.optimizer = None if has_none else torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)

    def step(self, tokens):
        loss = self.model(tokens)
        loss.backward()
        if self.optimizer is not None:
            self.optimizer.step()
        self.model.zero_grad(set_to_none=True)
        return loss.detach()


class Place:
    """This process's device and mesh."""

    def __init__(self, request):
        self.is_fake = request["world"] == "fake"
        self.compiles, self.optimizes = request["compiles"], request["optimizer"]
        self.device = torch.device("cpu")
        rank = int(os.environ["RANK"])
        if request["device"] == "cuda":
            self.device = torch.device("cuda", rank % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
        if self.is_fake:
            from torch.testing._internal.distributed.fake_pg import FakeStore

            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=request["ranks"])
        else:
            backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
            dist.init_process_group(backend, init_method="file://" + os.environ["FSDP_BENCH_STORE"], rank=rank,
                                    world_size=int(os.environ["WORLD_SIZE"]))
        self.mesh = init_device_mesh(self.device.type, (dist.get_world_size(),))

    @property
    def is_gpu(self):
        return self.device.type == "cuda"

    def synchronize(self):
        if self.is_gpu:
            torch.cuda.synchronize()

    def tokens(self, number, vocabulary):
        torch.manual_seed(dist.get_rank())
        rows = max(1, number // LONGEST_SEQUENCE)
        return torch.randint(vocabulary, (rows, number // rows)).to(self.device)

    def memory(self):
        """(now, peak, reserved at the peak), bytes."""
        if not self.is_gpu:
            return 0, 0, 0
        return (torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())

    def forget_peak(self):
        gc.collect()
        if self.is_gpu:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


class Clock:
    """Milliseconds of each step on the device, by events, and of the host until it has issued them."""

    def __init__(self, place, steps):
        self.place, self.steps = place, steps

    def run(self, step):
        self.place.synchronize()
        marks = []
        begin = time.perf_counter()
        marks.append(self.mark())
        for _ in range(self.steps):
            step()
            marks.append(self.mark())
        issued = time.perf_counter() - begin
        self.place.synchronize()
        return {"ms": self.between(marks), "issue_ms": 1e3 * issued / self.steps}

    def mark(self):
        if not self.place.is_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, marks):
        if not self.place.is_gpu:
            return [1e3 * (end - begin) for begin, end in zip(marks, marks[1:])]
        return [begin.elapsed_time(end) for begin, end in zip(marks, marks[1:])]


class Bench:
    def __init__(self, request):
        self.place = Place(request)
        self.subjects = {}
        self.vocabulary = None
        # The libraries' own memory, which the first steps take, is no model's.
        Subject("plain", self.place, TINY).step(self.place.tokens(128, TINY["vocabulary"]))

    def make(self, request):
        self.subjects.clear()
        self.vocabulary = request["shape"]["vocabulary"]
        for impl in request["impls"]:
            self.subjects[impl] = Subject(impl, self.place, request["shape"])
        return {"parameters": sum(parameter.numel() for parameter in next(iter(self.subjects.values())).model.parameters())}

    def drop(self, request):
        self.subjects.clear()
        self.place.forget_peak()
        return {"left_bytes": self.place.memory()[0]}

    def memory(self, request):
        """Peaks of steps of each number of tokens, above what was there before."""
        self.place.forget_peak()
        before = self.place.memory()[0]
        subject = Subject(request["impl"], self.place, request["shape"])
        peaks = []
        for number in request["tokens"]:
            tokens = self.place.tokens(number, request["shape"]["vocabulary"])
            for _ in range(2):
                subject.step(tokens)
            self.place.forget_peak()
            between = self.place.memory()[0] - before
            for _ in range(2):
                subject.step(tokens)
            _, peak, reserved = self.place.memory()
            peaks.append({"tokens": number, "between_steps_bytes": between, "peak_bytes": peak - before,
                          "reserved_bytes": reserved})
        return {"peaks": peaks}

    def step_of(self, request):
        subject = self.subjects[request["impl"]]
        tokens = self.place.tokens(request["tokens"], self.vocabulary)
        return lambda: subject.step(tokens)

    def warm(self, request):
        step = self.step_of(request)
        for _ in range(request["steps"]):
            loss = step()
        return {"loss": loss.item()}

    def time(self, request):
        return Clock(self.place, request["steps"]).run(self.step_of(request))

    def profile(self, request):
        step = self.step_of(request)
        step()
        self.place.synchronize()
        found = kernel_timeline.record(step, request["steps"], self.place.device)
        return {**found, "collectives": self.collectives_of(self.subjects[request["impl"]], step)}

    def summary(self, request):
        """Of a trace that the C++ library's process has written."""
        events = kernel_timeline.events_in(request["trace"], kernel_timeline.shown_of(self.place.device))
        return kernel_timeline.summary(events, request["steps"])

    def collectives_of(self, subject, step):
        """Of a step: gathers and reductions of groups."""
        if hasattr(subject.model, "statistics"):
            with worker.package().timeline(subject.model) as timeline:
                step()
            return sum(event.kind == "collective" for event in timeline.events)
        counter = mock.Mock(return_value=None)
        with contextlib.ExitStack() as stack:
            for name in COLLECTIVES & set(dir(dist)):
                stack.enter_context(mock.patch.object(dist, name, counted(getattr(dist, name), counter)))
            step()
        return counter.call_count


def counted(function, counter):
    def call(*args, **kwargs):
        counter()
        return function(*args, **kwargs)

    return call


def about(bench):
    gc.disable()  # no garbage collection inside a measurement; forget_peak collects
    name = torch.cuda.get_device_name(bench.place.device) if bench.place.is_gpu else "CPU"
    return {"device": name, "ranks": dist.get_world_size(), "torch": torch.__version__}


if __name__ == "__main__":
    worker.serve_one(Bench, about, lambda bench, request: getattr(bench, request["do"])(request))
