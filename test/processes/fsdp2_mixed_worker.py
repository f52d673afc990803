"""What fsdp2_mixed.cpp does, by FSDP2 itself: on ranks of its own, with the same folder."""

import dataclasses
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_gradient_divide_factors

import rows
from rows import BATCH, INNER, WIDTH, Net

MICRO_BATCHES = 2


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


def whole(tensors):
    """DTensors cut along dimension 0: whole, flattened, one behind another. full_tensor takes a collective for each."""
    of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, [tensor.to_local() for tensor in tensors])
    return torch.cat([torch.cat(shards).flatten() for shards in zip(*of_ranks)]).tolist()


def train(row, mesh, weights, inputs):
    if row.get("keep_scale") and not hasattr(MixedPrecisionPolicy(), "param_dtype_override_fn"):
        return {"skipped": f"FSDP2 of torch {torch.__version__} has no dtype for one parameter"}
    model = Net(Block)
    with torch.no_grad():
        for _, parameter, part in rows.parts(model, weights):
            parameter.copy_(part)
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
        gradients.append(whole([parameter.grad for parameter in model.parameters()]))
        optimizer.step()
    return {"losses": losses, "gradients": gradients, "weights": whole([each.detach() for each in model.parameters()])}


class GroupOf:
    """As much of a process group as the rule of division asks for."""

    def __init__(self, ranks):
        self.ranks = ranks

    def size(self):
        return self.ranks


def divisions():
    return [_get_gradient_divide_factors(GroupOf(ranks), None, torch.float16, "cpu")[:2] for ranks in range(1, 65)]


def results_of(all_rows, weights, inputs, rank, size):
    mesh = init_device_mesh("cpu", (size,))
    inputs = inputs.view(size, -1, MICRO_BATCHES, BATCH, WIDTH)[rank]
    return {row["name"]: train(row, mesh, weights, inputs) for row in all_rows} | {"divisions": divisions()}


if __name__ == "__main__":
    rows.run("fsdp2", results_of)
    sys.stdout.flush()
    os._exit(0)
