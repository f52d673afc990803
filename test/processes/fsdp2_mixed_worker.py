"""What fsdp2_mixed.cpp does, by FSDP2 itself: run by torchrun, with the same folder."""

import dataclasses
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_gradient_divide_factors

WIDTH, INNER, OUTPUTS, BLOCKS, BATCH, MICRO_BATCHES = 6, 8, 2, 3, 4, 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, x):
        h = self.down(torch.tanh(self.up(self.norm(x))))
        return x + (h * self.scale).to(x.dtype)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.add_module("in", nn.Linear(WIDTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, OUTPUTS)

    def forward(self, x):
        x = getattr(self, "in")(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.to(self.head.weight.dtype))


def dtype_of(row, key):
    return getattr(torch, row[key]) if key in row else None


def policy_of(row, block):
    """reduce_dtype unset is param_dtype here, as it was before torch 2.15."""
    policy = MixedPrecisionPolicy(
        param_dtype=dtype_of(row, "param"), reduce_dtype=dtype_of(row, "reduce") or dtype_of(row, "param"),
        output_dtype=dtype_of(row, "output"), cast_forward_inputs=row.get("cast_forward_inputs", True))
    if row.get("keep_scale") and block is not None:
        keep = {"param_dtype_override_fn": lambda p: torch.float32 if p is block.scale else None}
        return dataclasses.replace(policy, **keep)
    return policy


def train(row, mesh, weights, inputs):
    """None: this torch has no override for one parameter."""
    if row.get("keep_scale") and not hasattr(MixedPrecisionPolicy(), "param_dtype_override_fn"):
        return None
    model = Net()
    with torch.no_grad():
        begin = 0
        for parameter in model.parameters():
            parameter.copy_(weights[begin:begin + parameter.numel()].view(parameter.shape))
            begin += parameter.numel()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy_of(row, block))
    fully_shard(model, mesh=mesh, mp_policy=policy_of(row, None))
    for module in [model, *model.blocks]:
        if "divide_factor" in row:
            module.set_gradient_divide_factor(row["divide_factor"])
        module.set_force_sum_reduction_for_comms(row.get("force_sum", False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)
    micro_batches = MICRO_BATCHES if row.get("accumulate") else 1
    losses, gradients = [], []
    for batches in inputs:
        optimizer.zero_grad()
        for micro in range(micro_batches):
            model.set_requires_gradient_sync(micro + 1 == micro_batches)
            loss = model(batches[micro].to(dtype_of(row, "input") or torch.float32)).float().square().mean()
            loss.backward()
            losses.append(loss.item())
        gradients.append(torch.cat([p.grad.full_tensor().flatten() for p in model.parameters()]).tolist())
        optimizer.step()
    final = torch.cat([parameter.detach().full_tensor().flatten() for parameter in model.parameters()])
    return {"losses": losses, "gradients": gradients, "weights": final.tolist()}


class GroupOf:
    """As much of a process group as the rule of division asks for."""

    def __init__(self, ranks):
        self.ranks = ranks

    def size(self):
        return self.ranks


def divisions():
    return [_get_gradient_divide_factors(GroupOf(ranks), None, torch.float16, "cpu")[:2] for ranks in range(1, 65)]


def read_doubles(path):
    return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.float64)


def main():
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    weights = read_doubles(folder / "weights.bin")
    inputs = read_doubles(folder / "inputs.bin").view(size, -1, MICRO_BATCHES, BATCH, WIDTH)[rank]
    rows = json.loads((folder / "rows.json").read_text())
    results = {row["name"]: train(row, mesh, weights, inputs) for row in rows}
    results["divisions"] = divisions()
    (folder / f"fsdp2_{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
