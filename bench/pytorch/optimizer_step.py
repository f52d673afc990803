"""The optimizer's step and the clipping of gradients: on DTensor parameters of FSDP2 and of the extension, on the
extension's local shards, and on plain tensors of the same local sizes. All in one process, over collectives that
move nothing.

`setup` names groups, params (a group), local_numel (elements that a rank holds of each) and world. `turns` names what
(fused, foreach, clip) and turns; the reply holds each turn's CPU seconds by kind. `count` runs each kind once;
callgrind's count is dumped under the label and the kind.
"""

import gc

import torch

import free_network
import worker

extension = worker.extension()
KINDS = ("plain", "fsdp2", "python", "local_shards")


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


class Kind:
    """One kind of parameters with gradients, and what is measured on them."""

    def __init__(self, kind, request):
        sharded = kind != "plain"
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
        self.parameters = parameters
        self.fused = torch.optim.AdamW(parameters, lr=1e-4, fused=True).step
        self.foreach = torch.optim.AdamW(parameters, lr=1e-4, foreach=True).step

    def clip(self):
        self.clip_(self.parameters, 1.0)


kinds = {}


def answer(request):
    global kinds
    if request["do"] == "setup":
        kinds = {}
        gc.collect()
        kinds = {kind: Kind(kind, request) for kind in KINDS}
        for what in ("fused", "foreach", "clip"):
            for kind in kinds.values():
                for _ in range(3):
                    getattr(kind, what)()
        worker.quiet_collector()
        return {}
    functions = {name: getattr(kind, request["what"]) for name, kind in kinds.items()}
    if request["do"] == "count":
        for name, function in functions.items():
            extension.start_counting_instructions()
            function()
            extension.stop_counting_instructions(f"{request['label']}-{name}")
        return {}
    turns, order = [], list(functions)
    for _ in range(request["turns"]):
        turns.append({name: worker.cpu_seconds(functions[name]) for name in order})
        order.append(order.pop(0))  # whose data the one before has driven out of the cache
    return {name: [turn[name] for turn in turns] for name in functions}


if __name__ == "__main__":
    free_network.install()
    worker.serve(answer)
