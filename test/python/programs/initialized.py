"""torch.nn.init on sharded parameters, and the tensors that Tensor.new_* make of them."""

import torch
import torch.distributed.fsdp
import torch.nn as nn
from torch.distributed.tensor import DTensor

from .common import mesh_of, program

# sparse_ is beyond FSDP2.
INITS = sorted(name for name in dir(nn.init) if name.endswith("_") and not name.startswith("_") and name != "sparse_")
ARGUMENTS = {"constant_": (0.5,)}


class Shapes(nn.Module):
    def __init__(self):
        super().__init__()
        self.vector = nn.Parameter(torch.ones(8))
        self.matrix = nn.Parameter(torch.ones(8, 4))
        self.kernel = nn.Parameter(torch.ones(8, 4, 3))
        self.image = nn.Parameter(torch.ones(8, 4, 3, 3))


@program(variants=[(name,) for name in INITS])
def parameters_filled_by(api, ranks, name):
    found = {}
    for key, parameter in api.fully_shard(Shapes(), mesh=mesh_of(ranks)).named_parameters():
        torch.manual_seed(0)
        shard = parameter.to_local().shape
        try:
            returned = getattr(nn.init, name)(parameter, *ARGUMENTS.get(name, ()))
            found[key] = (returned is parameter, parameter.detach())
            # FSDP2 of torch 2.11 lets eye_ resize each shard to the whole matrix.
            if api is torch.distributed.fsdp and parameter.to_local().shape != shard:
                found[key] = RuntimeError.__name__
        except (RuntimeError, ValueError) as error:
            found[key] = type(error).__name__
    return found


NEW = {
    "new_tensor": [lambda p: p.new_tensor([1.0, 2.0]), lambda p: p.new_tensor(3),
                   lambda p: p.new_tensor([1.5], dtype=torch.int64), lambda p: p.new_tensor(1.0, requires_grad=True)],
    "new": [lambda p: p.new(), lambda p: p.new(2, 3), lambda p: p.new(torch.Size([2, 3])), lambda p: p.new([1.0, 2.0]),
            lambda p: p.new(torch.ones(2)), lambda p: p.new(2, 3).zero_() + 1],
    "new_zeros": [lambda p: p.new_zeros(2, 3), lambda p: p.new_zeros((2, 3), dtype=torch.float64)],
    "new_ones": [lambda p: p.new_ones(2, 3)],
    "new_full": [lambda p: p.new_full((2, 3), 7.0)],
    "new_empty": [lambda p: p.new_empty(2, 3)],
    "new_empty_strided": [lambda p: p.new_empty_strided((2, 3), (1, 2))],
    "new_of_views": [lambda p: p.data.new(2, 3), lambda p: p.data.new_tensor([1.0]), lambda p: p.detach().new(2, 3),
                     lambda p: p.view(-1).new_tensor([1.0]), lambda p: p[0].new_tensor([1.0]), lambda p: p.t().new(1)],
    "type": [lambda p: p.type(), lambda p: p.type(torch.float64), lambda p: p.type("torch.DoubleTensor"),
             lambda p: p.type_as(torch.ones(1, dtype=torch.float64))],
}


def kind_of(made):
    if not isinstance(made, torch.Tensor):
        return made
    placements = made.placements if isinstance(made, DTensor) else None
    return type(made).__name__, tuple(made.shape), made.stride(), made.dtype, made.requires_grad, placements


@program(variants=[(name,) for name in NEW])
def tensors_made_by(api, ranks, name):
    makers = NEW[name]

    class Reads(Shapes):
        def forward(self, x):
            self.inside = [kind_of(make(self.matrix)) for make in makers]
            return x @ self.matrix

    model = api.fully_shard(Reads(), mesh=mesh_of(ranks))
    outside = [kind_of(make(model.matrix)) for make in makers]
    model(torch.ones(2, 8)).sum().backward()
    return {"outside": outside, "inside": model.inside, "afterwards": [kind_of(make(model.matrix)) for make in makers],
            "gradient": [kind_of(make(model.matrix.grad)) for make in makers]}
