"""What the programs are made of, and their table."""

import functools
import importlib.util

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor, distribute_tensor

from shared_mesh import shared_mesh

PROGRAMS = {}
WIDTH, INPUTS, OUTPUTS = 9, 7, 3


class Program:
    """needs: packages without which it does not run. is_long: for a thorough run alone."""

    def __init__(self, function, arguments, ranks, tolerance, needs, is_long):
        self.function, self.arguments, self.ranks, self.tolerance = function, arguments, ranks, tolerance
        self.needs, self.is_long = needs, is_long

    def run(self, api, ranks):
        torch.manual_seed(0)
        return self.function(api, ranks, *self.arguments)

    def missing(self):
        return [package for package in self.needs if importlib.util.find_spec(package) is None]


def registering(table):
    """The decorator that puts programs into `table`."""

    def program(function=None, *, ranks=(2, 4), variants=((),), long_variants=(), tolerance=0.0, needs=()):
        """Registers a program, once for each tuple of arguments behind (api, ranks).

        long_variants: those of the variants that a thorough run alone takes. tolerance: relative, where FSDP2 adds the same
        numbers up in another order.
        """
        if function is None:
            return functools.partial(program, ranks=ranks, variants=variants, long_variants=long_variants, tolerance=tolerance,
                                     needs=needs)
        for arguments in variants:
            name = function.__name__ + "".join(f"_{argument}" for argument in arguments)
            table[name.replace(" ", "_")] = Program(function, arguments, ranks, tolerance, needs, arguments in long_variants)
        return function

    return program


program = registering(PROGRAMS)


class Block(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, blocks=3):
        super().__init__()
        self.enter = nn.Linear(INPUTS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, OUTPUTS)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale


def batches(steps, rank=None, dtype=torch.float32):
    rank = torch.distributed.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(1000 + rank)
    return [torch.randn(5, INPUTS, generator=generator, dtype=dtype) for _ in range(steps)]


def mesh_of(ranks):
    return shared_mesh(ranks)


def shard(api, model, **options):
    for block in model.blocks:
        api.fully_shard(block, **options)
    api.fully_shard(model, **options)
    return model


def shown(model):
    """What is registered: whether sharded, with which placements, dtypes and sizes."""
    return [describe(name, parameter) for name, parameter in model.named_parameters()]


def describe(name, parameter):
    kind = "DTensor" if isinstance(parameter, DTensor) else "Tensor"
    placements = str(parameter.placements) if isinstance(parameter, DTensor) else ""
    return f"{name}: {kind} {tuple(parameter.shape)} {parameter.dtype} {placements} {parameter.requires_grad}"


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def weights(model):
    return dict(model.named_parameters())


def train(model, optimizer, inputs, loss_of=lambda y: y.square().mean(), max_norm=None):
    losses, norms = [], []
    for x in inputs:
        loss = loss_of(model(x))
        optimizer.zero_grad()
        loss.backward()
        if max_norm is not None:
            norms.append(full(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        optimizer.step()
        losses.append(loss.detach())
    return {"losses": losses, "norms": norms, "gradients": gradients(model), "weights": weights(model)}


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def fill(model):
    for parameter in model.parameters():
        fill_parameter(parameter)


def fill_parameter(parameter):
    """Values of which neighbours differ: of equal ones a norm makes zeros, and gradients of their rounding."""
    with torch.no_grad():
        parameter.copy_(torch.full_like(parameter, 0.1))
        steps = ((torch.arange(parameter.numel()) * 5 % 11 - 5) / 32).view(parameter.shape)
        if isinstance(parameter, DTensor):
            steps = distribute_tensor(steps, parameter.device_mesh, parameter.placements)
        parameter.add_(steps)


# Of what a step divides by. A small one would blow up the rounding of a gradient that is next to zero to a whole step.
EPS = 1e-2


def adam(model, fused=True):
    """fused: one operator a step, where a loop has a dozen for each parameter; not for DTensors beside tensors."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=EPS, fused=fused)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def error_of(function):
    try:
        function()
    except Exception as error:
        return type(error).__name__
    return "no error"
