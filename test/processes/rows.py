"""What the workers of the comparisons with FSDP1 and FSDP2 share; rows.hpp is their counterpart."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

WIDTH, INNER, OUTPUTS, BLOCKS, BATCH = 6, 8, 2, 3, 4


class Net(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.add_module("in", nn.Linear(WIDTH, WIDTH))
        self.blocks = nn.ModuleList(block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, OUTPUTS)

    def forward(self, x):
        x = getattr(self, "in")(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.to(self.head.weight.dtype))


def parts(model, weights):
    """Each parameter's name, itself, and its part of all weights."""
    begin = 0
    for name, parameter in model.named_parameters():
        yield name, parameter, weights[begin:begin + parameter.numel()].view(parameter.shape)
        begin += parameter.numel()


def read_doubles(path):
    return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.float64)


def run(side, results_of):
    """results_of(rows, weights, inputs, rank, size): a dict by row. `inputs`: flat, all ranks'."""
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    results = results_of(json.loads((folder / "rows.json").read_text()), read_doubles(folder / "weights.bin"),
                         read_doubles(folder / "inputs.bin"), rank, dist.get_world_size())
    (folder / f"{side}_{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()
