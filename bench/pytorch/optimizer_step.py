"""The optimizer's step and the clipping of gradients: on DTensor parameters of FSDP2 and of the extension, on the
extension's local shards, or on plain tensors of the same local sizes, over collectives that move nothing.

`setup` names the kind (plain_tensors, fsdp2, python, local_shards), groups, params (a group), local_numel (elements that a rank
holds of each) and world. `time` names what (fused, foreach, clip); the reply holds the CPU seconds of one call. `count`
runs one for callgrind, whose count is dumped under label.
"""

import torch
from torch.distributed.tensor import DTensor

import free_network
import worker

extension = worker.extension()


class Group(torch.nn.Module):
    def __init__(self, params, numel):
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.nn.Parameter(torch.full((numel,), 0.01)) for _ in range(params))

    def forward(self):
        return sum(weight.square().sum() for weight in self.weights)


class Model(torch.nn.Module):
    def __init__(self, groups, params, numel):
        super().__init__()
        self.groups = torch.nn.ModuleList(Group(params, numel) for _ in range(groups))

    def forward(self):
        return sum(group() for group in self.groups)


def local_of(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Kind:
    """One kind of parameters with gradients, and what is measured on them."""

    def __init__(self, kind, request):
        sharded = kind != "plain_tensors"
        world = request["world"] if sharded else 1
        self.model = Model(request["groups"], request["params"], world * request["local_numel"])
        if sharded:
            mesh = free_network.start_world(world)
            fully_shard = worker.fully_shard_of("fsdp2" if kind == "fsdp2" else "python")
            for group in self.model.groups:
                fully_shard(group, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        parameters = list(self.model.parameters())
        self.clip_ = torch.nn.utils.clip_grad_norm_
        if kind == "local_shards":
            parameters, self.clip_ = worker.package().local_shards(self.model), worker.package().clip_grad_norm_
        self.model().backward()
        for parameter in parameters:  # what a network that moves nothing leaves may be any bits: some take a slower path
            local_of(parameter.grad).fill_(0.01)
        self.parameters = parameters
        self.fused = torch.optim.AdamW(parameters, lr=1e-4, fused=True).step
        self.foreach = torch.optim.AdamW(parameters, lr=1e-4, foreach=True).step

    def clip(self):
        self.clip_(self.parameters, 1.0)


def make(request):
    measured = Kind(request["kind"], request)
    for what in ("fused", "foreach", "clip"):
        for _ in range(3):
            getattr(measured, what)()
    worker.quiet_collector()
    return measured


def answer(measured, request):
    function = getattr(measured, request["what"])
    if request["do"] == "time":
        function()  # what the other processes have driven out of the caches comes back
        return {"cpu_seconds": worker.cpu_seconds(function)}
    extension.start_counting_instructions()
    function()
    extension.stop_counting_instructions(request["label"])
    return {}


if __name__ == "__main__":
    free_network.install()
    worker.serve_one(make, lambda measured: {}, answer)
