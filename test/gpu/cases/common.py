"""What the cases are made of, and their table."""

import dataclasses
import functools

import torch
import torch.distributed.fsdp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fsdp

CASES = {}
# Kernels long enough to overlap; rows that two ranks do not share evenly.
WIDTH, HIDDEN, VOCABULARY = 192, 501, 97
STEPS = 4
TOLERANCE = 1e-5


class Skip(Exception):
    """Why a case has nothing to look at here."""


@dataclasses.dataclass
class Case:
    """worlds: names in worlds.py."""

    function: object
    arguments: tuple
    worlds: tuple

    def run(self, place):
        torch.manual_seed(0)
        return self.function(place, *self.arguments)


def case(function=None, *, worlds=("one", "gloo", "nccl"), variants=((),)):
    """Registers a case, once for each tuple of arguments behind the place. It returns what it has found, a dict, and
    raises AssertionError where that is wrong."""
    if function is None:
        return functools.partial(case, worlds=worlds, variants=variants)
    for arguments in variants:
        name = function.__name__ + "".join(f"_{argument}" for argument in arguments)
        CASES[name] = Case(function, arguments, worlds)
    return function


@dataclasses.dataclass
class Place:
    """Where a case runs: this rank of a world, with its device."""

    device: torch.device
    world: str
    rank: int
    ranks: int

    @property
    def is_gpu(self):
        return self.device.type == "cuda"

    def mesh(self):
        return init_device_mesh(self.device.type, (self.ranks,))

    def needs_gpu(self):
        if not self.is_gpu:
            raise Skip("needs a GPU")


class Block(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, blocks=4, width=WIDTH, hidden=HIDDEN):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens):
        """Mean cross-entropy of each next token."""
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def make_model(place, **sizes):
    """The same values on every rank."""
    torch.manual_seed(3)
    with torch.device(place.device):
        return Model(**sizes)


def batch(place, rank, index, rows=8):
    """Made on the CPU: the same on every device."""
    generator = torch.Generator().manual_seed(1000 * rank + index)
    return torch.randint(VOCABULARY, (rows, 33), generator=generator).to(place.device)


def shard(place, model, api=fsdp, *, mesh=None, root={}, **options):
    """Every block, then the root. root: options of the root alone."""
    options = {"mesh": mesh if mesh is not None else place.mesh(), **options}
    for block in model.blocks:
        api.fully_shard(block, **options)
    api.fully_shard(model, **{**options, **root})
    if api is torch.distributed.fsdp and place.world == "gloo":
        for module in [*model.blocks, model]:
            module.set_force_sum_reduction_for_comms(True)  # gloo has no average
    return model


def adam(parameters, **options):
    """eps: large enough that the rounding of small gradients is not made large."""
    parameters = parameters.parameters() if isinstance(parameters, nn.Module) else parameters
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4, **options)


@dataclasses.dataclass
class Trained:
    losses: list
    norms: list
    gradients: dict
    weights: dict


def result_of(model, losses, norms=()):
    parameters = dict(model.named_parameters())
    return Trained([loss.item() for loss in losses], [float(full(norm)) for norm in norms],
                   {name: copy_of(parameter.grad) for name, parameter in parameters.items()},
                   {name: copy_of(parameter) for name, parameter in parameters.items()})


def copy_of(tensor):
    if tensor is None:
        return None
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach().cpu().clone()


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train_plain(place, model, optimizer, steps=STEPS, micro_batches=1, max_norm=None):
    """On the batches of all ranks; the losses are those of this rank's."""
    losses, norms = [], []
    for step in range(steps):
        optimizer.zero_grad()
        for micro in range(micro_batches):
            for rank in range(place.ranks):
                loss = model(batch(place, rank, step * micro_batches + micro))
                (loss / place.ranks).backward()
                if rank == place.rank:
                    losses.append(loss.detach())
        if max_norm is not None:
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm))
        optimizer.step()
    return result_of(model, losses, norms)


def train(place, model, optimizer, steps=STEPS, micro_batches=1, max_norm=None, after_step=None, accumulate=False):
    """A sharded model on this rank's batches. accumulate: gradients are reduced with the last micro-batch's only."""
    losses, norms = [], []
    for step in range(steps):
        optimizer.zero_grad()
        for micro in range(micro_batches):
            if accumulate:
                model.set_requires_gradient_sync(micro == micro_batches - 1)
            loss = model(batch(place, place.rank, step * micro_batches + micro))
            loss.backward()
            losses.append(loss.detach())
        if max_norm is not None:
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm))
        optimizer.step()
        if after_step is not None:
            after_step(model)
    return result_of(model, losses, norms)


def part_of(tensor, mesh):
    """This rank's rows, as Shard(0) over the mesh's last dimension cuts them."""
    dim = mesh.ndim - 1
    pieces = tensor.chunk(mesh.size(dim))
    index = mesh.get_local_rank(dim)
    return pieces[index] if index < len(pieces) else tensor[:0]


def apart(mine, other):
    """The largest difference, in times of the other's largest value."""
    assert mine.shape == other.shape, f"shapes {tuple(mine.shape)} and {tuple(other.shape)}"
    if mine.numel() == 0:
        return 0.0
    difference = (mine.double() - other.double()).abs().max().item()
    scale = max(other.double().abs().max().item(), 1e-3)
    assert difference == difference, "not a number"
    return difference / scale


def compare(found, expected, mesh, tolerance=TOLERANCE):
    """Against a plain model's (mesh None: one that is sharded alike). How far apart they are: 0 is bit for bit."""
    part = (lambda tensor: tensor) if mesh is None else functools.partial(part_of, mesh=mesh)
    worst = {"losses": apart(torch.tensor(found.losses), torch.tensor(expected.losses))}
    if expected.norms:
        worst["norms"] = apart(torch.tensor(found.norms), torch.tensor(expected.norms))
    for kind in ("gradients", "weights"):
        mine, theirs = getattr(found, kind), getattr(expected, kind)
        assert mine.keys() == theirs.keys(), f"{kind} of {sorted(mine)} and of {sorted(theirs)}"
        worst[kind] = max(apart(mine[name], part(theirs[name])) for name in mine if mine[name] is not None)
    wrong = {kind: value for kind, value in worst.items() if value > tolerance}
    assert not wrong, f"too far apart, relative to the largest (at most {tolerance}): {worst}"
    return worst
