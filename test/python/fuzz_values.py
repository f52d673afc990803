"""Right and wrong arguments for fuzz_binding.py, and small models, all drawn from one random.Random."""

import torch
import torch.distributed as dist
import torch.distributed.fsdp
import torch.nn as nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import fsdp
from fsdp import _C

WIDTH = 4


class Raised(Exception):
    """What callbacks raise."""


class Lying:
    """Answers every question, with nothing that is of use."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Lying()

    def __call__(self, *args, **kwargs):
        return Lying()

    def __iter__(self):
        return iter([Lying()])


class Broken:
    """Fails whenever it is asked."""

    def __bool__(self):
        raise Raised("bool")

    def __iter__(self):
        raise Raised("iter")

    def __hash__(self):
        raise Raised("hash")

    def __eq__(self, other):
        raise Raised("eq")

    def __repr__(self):
        return "Broken()"

    def __float__(self):
        raise Raised("float")


class Block(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        if draw.random() < 0.2:
            self.scale = nn.Parameter(torch.tensor(1.5))
        if draw.random() < 0.2:
            self.unused = nn.Parameter(torch.ones(draw.choice([0, 1, 3]), 2))
        if draw.random() < 0.2:
            self.register_buffer("shift", torch.zeros(WIDTH))
        if draw.random() < 0.1:
            self.counts = nn.Parameter(torch.ones(3, dtype=torch.int64), requires_grad=False)
        if draw.random() < 0.1:
            self.register_parameter("none", None)

    def forward(self, x):
        y = self.norm(torch.relu(self.first(x)))
        return y * self.scale if hasattr(self, "scale") else y

    def other(self, x):
        return self.first(x)


class Nested(nn.Module):
    """Returns what it is told to."""

    def __init__(self, draw):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.kind = draw.choice(["dict", "deep", "itself", "none", "text"])

    def forward(self, x):
        y = self.linear(x)
        if self.kind == "dict":
            return {"y": [y, (y, None)], "n": 3}
        if self.kind == "deep":
            for _ in range(100_000):
                y = [y]
        if self.kind == "itself":
            y = [y]
            y.append(y)
        return None if self.kind == "none" else "text" if self.kind == "text" else y


def model(draw):
    kind = draw.randrange(12)
    if kind == 0:
        return nn.Linear(WIDTH, WIDTH, bias=draw.random() < 0.5)
    if kind == 1:
        return Nested(draw)
    if kind == 2:
        return nn.Sequential()
    if kind == 3:
        with torch.device("meta"):
            return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))
    if kind == 4:
        made = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        made[1].weight = made[0].weight
        return made
    if kind == 5:
        return nn.Sequential(*[Block(draw) for _ in range(3)]).to(draw.choice([torch.bfloat16, torch.float64]))
    if kind == 6:
        made = nn.Sequential(nn.Linear(WIDTH, WIDTH))
        made[0].around = made
        return made
    if kind == 7:
        return draw.choice([nn.ModuleList([nn.Linear(WIDTH, WIDTH)]), nn.ModuleDict(), nn.LazyLinear(WIDTH),
                            nn.ParameterList([torch.ones(3)]), nn.Embedding(5, WIDTH), nn.BatchNorm1d(WIDTH)])
    if kind == 8:
        made = nn.Linear(WIDTH, WIDTH)
        for _ in range(draw.choice([3, 300, 2000])):
            made = nn.Sequential(made)
        return made
    made = nn.Sequential(*[Block(draw) for _ in range(draw.randrange(1, 4))])
    for parameter in made.parameters():
        if draw.random() < 0.1:
            parameter.requires_grad_(False)
    return made


def number(draw):
    return draw.choice([0, 1, 2, 3, -1, -7, 2**31, -2**31, 2**63, 2**64, -2**63 - 1, 10**40, 0.0, 0.5, -1.5, 1e308,
                        float("nan"), float("inf"), True, False])


def tensor(draw):
    return draw.choice([
        lambda: torch.randn(2, WIDTH), lambda: torch.randn(2, WIDTH, requires_grad=True), lambda: torch.randn(3, 7),
        lambda: torch.ones(2, WIDTH, dtype=torch.int64), lambda: torch.randn(2, WIDTH).to(torch.bfloat16),
        lambda: torch.tensor(1.0), lambda: torch.empty(0), lambda: torch.empty(2, WIDTH, device="meta"),
        lambda: torch.eye(WIDTH).to_sparse(), lambda: nn.Parameter(torch.ones(3)),
        lambda: torch.ones(2, WIDTH, dtype=torch.complex64)])()


def callback(draw):
    results = [None, 3, "x", Shard(0), Shard(1), Shard(-1), Shard(9), Replicate(), Partial(), torch.bfloat16,
               torch.float32, torch.int8, Lying(), [], 10**40]
    result = draw.choice(results)

    def function(*args, **kwargs):
        if kind == "raises":
            raise Raised("callback")
        if kind == "exits":
            raise SystemExit(3)
        if kind == "recursive":
            return function()
        return result

    kind = draw.choice(["returns"] * 6 + ["raises", "exits", "recursive"])
    return draw.choice([function, function, lambda: result, print, len])


def policy(draw, api=fsdp):
    dtypes = [None, None, torch.bfloat16, torch.float16, torch.float64, torch.int64, "float", 3]
    more = {}
    if draw.random() < 0.2:
        more["param_dtype_override_fn"] = callback(draw)
    if api is fsdp and draw.random() < 0.2:
        more.update(buffer_dtype=draw.choice(dtypes), full_precision_in_eval=draw.choice([True, False, None, "x"]),
                    is_exempt=draw.choice([None, callback(draw)]))
    return api.MixedPrecisionPolicy(param_dtype=draw.choice(dtypes), reduce_dtype=draw.choice(dtypes),
                                    output_dtype=draw.choice(dtypes),
                                    cast_forward_inputs=draw.choice([True, True, False, None, "x"]), **more)


def odd(draw, pool):
    """Anything at all."""
    return draw.choice([
        lambda: None, lambda: number(draw), lambda: number(draw), lambda: tensor(draw), lambda: callback(draw),
        lambda: draw.choice(["", "x", "cpu", "weight", "forward", "\0", "\ud800", "a" * 10_000]),
        lambda: draw.choice([b"", b"x", (), [], {}, set(), {"a": 1}, [None], [[]], range(3), object(), ...]),
        lambda: draw.choice([Lying, Broken, nn.Linear, _C.ShardedModule, fsdp.FSDPModule, dist.ProcessGroup])(
            ) if draw.random() < 0.5 else draw.choice([Lying, nn.Linear, _C.ShardedModule, fsdp.FSDPModule]),
        lambda: Broken(), lambda: draw.choice(pool.models), lambda: list(pool.models), lambda: draw.choice(pool.cores),
        lambda: list(pool.cores), lambda: pool.mesh, lambda: pool.core_mesh, lambda: dist.group.WORLD,
        lambda: draw.choice(pool.handles), lambda: policy(draw), lambda: fsdp.CPUOffloadPolicy(pin_memory=False),
        lambda: torch.bfloat16, lambda: Shard(draw.choice([0, 1, -1, 7])), lambda: next(pool.parameters(), None),
    ])()


def is_sharded(value):
    return isinstance(value, DTensor)
