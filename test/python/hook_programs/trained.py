"""Training with such parameters."""

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from programs.common import INPUTS, full, mesh_of

from .subclasses import Halved, Quantized, SavesItself, WithScales, parts, seen
from .table import program

WIDTH = 8


class Net(nn.Module):
    def __init__(self, wrap, width=WIDTH, recomputes=False):
        super().__init__()
        self.enter = nn.Linear(INPUTS, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.head = nn.Linear(width, 3)
        self.recomputes = recomputes
        for block in self.blocks:
            block.weight = nn.Parameter(wrap(block.weight.detach()))

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = torch.relu(checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)) + x
        return self.head(x)


def sharded(api, net, ranks, **options):
    for block in net.blocks:
        api.fully_shard(block, mesh=mesh_of(ranks), **options)
    return api.fully_shard(net, mesh=mesh_of(ranks), **options)


def inputs(steps):
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    return [torch.randn(5, INPUTS, generator=generator) for _ in range(steps)]


def held(net):
    return {name: [str(parameter.placements), tuple(parameter.shape), str(parameter.dtype),
                   parts(parameter.to_local())] for name, parameter in net.named_parameters()}


def train(net, optimizer, steps=4, max_norm=None):
    seen.clear()
    losses, gradients = [], []
    for x in inputs(steps):
        optimizer.zero_grad()
        loss = net(x).float().square().mean()
        loss.backward()
        if max_norm is not None:
            losses.append(full(torch.nn.utils.clip_grad_norm_(net.parameters(), max_norm)))
        optimizer.step()
        losses.append(loss.detach())
        gradients.append({name: parameter.grad for name, parameter in net.named_parameters()})
    return {"losses": losses, "gradients": gradients, "held": held(net), "seen": sorted(seen)}


def sgd(net):
    return torch.optim.SGD(net.parameters(), lr=0.05, foreach=False)


@program(ranks=(2,), variants=[("Halved",), ("WithScales",), ("SavesItself",), ("Quantized",)])
def steps_with(api, ranks, name):
    return train(net := sharded(api, Net(maker(name)), ranks), sgd(net))


def maker(name):
    return {"Halved": Halved, "WithScales": WithScales, "SavesItself": SavesItself, "Quantized": Quantized.of}[name]


@program(ranks=(2,), variants=[("Halved",), ("WithScales",), ("Quantized",)])
def in_mixed_precision(api, ranks, name):
    policy = api.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    net = sharded(api, Net(maker(name)), ranks, mp_policy=policy)
    return train(net, sgd(net))


@program(ranks=(2,), variants=[("Halved",), ("Quantized",)])
def recomputed(api, ranks, name):
    net = sharded(api, Net(maker(name), recomputes=True), ranks)
    return train(net, sgd(net))


@program(ranks=(2,), variants=[("Halved",), ("SavesItself",)])
def not_released_after_forward(api, ranks, name):
    net = sharded(api, Net(maker(name)), ranks, reshard_after_forward=False)
    return train(net, sgd(net), max_norm=0.1)


@program(ranks=(2,))
def uneven_rows_padded_by_the_hook(api, ranks):
    net = sharded(api, Net(Halved, width=9), ranks)
    return train(net, sgd(net))


@program(ranks=(2,))
def frozen(api, ranks):
    net = Net(Quantized.of)
    for block in net.blocks:
        block.weight.requires_grad_(False)
    return train(sharded(api, net, ranks), torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.05))


@program(ranks=(2,))
def in_one_group(api, ranks):
    net = api.fully_shard(Net(Halved), mesh=mesh_of(ranks))
    return train(net, sgd(net))


@program(ranks=(2,))
def accumulated(api, ranks):
    net = sharded(api, Net(WithScales), ranks)
    for micro, x in enumerate(inputs(4)):
        net.set_requires_gradient_sync(micro % 2 == 1)
        net(x).square().mean().backward()
    return {name: parameter.grad for name, parameter in net.named_parameters()}


@program(ranks=(2,))
def evaluated_between_steps(api, ranks):
    net = sharded(api, Net(Halved), ranks)
    optimizer = sgd(net)
    found = []
    for _ in range(2):
        with torch.no_grad():
            found.append(net(inputs(1)[0]))
        found.append(train(net, optimizer, steps=1))
    return found


@program(ranks=(2,))
def unsharded_by_hand(api, ranks):
    net = sharded(api, Net(Halved), ranks)
    found = []
    for _ in range(2):
        net.blocks[0].unshard()
        weight = net.blocks[0].weight
        found.append([isinstance(weight, DTensor), tuple(weight.shape), weight.detach().clone()])
        net.blocks[0].reshard()
        found.append(parts(net.blocks[0].weight.to_local()))
    return found


@program(ranks=(2,))
def loaded_from_its_state_dict(api, ranks):
    net = sharded(api, Net(Halved), ranks)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    trained = train(net, sgd(net), steps=2)
    net.load_state_dict(before)
    return [trained, held(net), train(net, sgd(net), steps=1)]


@program(ranks=(2,))
def on_one_rank(api, ranks):
    mesh = torch.distributed.init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("all", "one"))["one"]
    net = Net(Halved)
    for block in net.blocks:
        api.fully_shard(block, mesh=mesh)
    api.fully_shard(net, mesh=mesh)
    return train(net, sgd(net))


@program(ranks=(2,))
def replicated_and_sharded(api, ranks):
    mesh = torch.distributed.init_device_mesh("cpu", (1, ranks), mesh_dim_names=("replicate", "shard"))
    net = Net(Halved)
    for block in net.blocks:
        api.fully_shard(block, mesh=mesh)
    api.fully_shard(net, mesh=mesh)
    return train(net, sgd(net))
