"""The start of a model of many small modules: fully_shard on each, then the first step, over a free network.

A request names impls (fsdp2, python), which take turns, modules, world, device (cpu, or meta: then to_empty comes behind
fully_shard), repeats and label; the reply holds the CPU seconds of each phase. Under callgrind the instructions of each phase
are dumped under the label, the implementation and the phase; without a label they are not counted.
"""

import gc

import torch

import free_network
import worker

extension = worker.extension()
WIDTH = 8


class Model(torch.nn.Module):
    def __init__(self, modules):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(modules))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def measured(function, label):
    if label is None:
        return worker.cpu_seconds(function)
    extension.start_counting_instructions()
    taken = worker.cpu_seconds(function)
    extension.stop_counting_instructions(label)
    return taken


def start(impl, request):
    """Seconds of fully_shard on every module and the root, of to_empty, and of the first step."""
    gc.collect()
    mesh = free_network.start_world(request["world"])
    with torch.device(request["device"]):
        model = Model(request["modules"])
    fully_shard = worker.fully_shard_of(impl)

    def shard():
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)

    def step():
        model(torch.ones(2, WIDTH)).sum().backward()

    def label(phase):
        return f"{request['label']}-{impl}-{phase}" if "label" in request else None

    taken = {"fully_shard": measured(shard, label("fully_shard"))}
    if request["device"] == "meta":
        taken["to_empty"] = measured(lambda: model.to_empty(device="cpu"), label("to_empty"))
        for layer in model.layers:
            layer.reset_parameters()
    return {**taken, "first_step": measured(step, label("first_step"))}


def answer(request):
    turns = [{impl: start(impl, request) for impl in request["impls"]} for _ in range(request["repeats"])]
    return {impl: {phase: [turn[impl][phase] for turn in turns] for phase in turns[0][impl]} for impl in request["impls"]}


if __name__ == "__main__":
    free_network.install()
    gc.disable()
    worker.serve(answer)
