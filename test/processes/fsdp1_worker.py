"""What fsdp1_rows.cpp does, by FSDP1 itself: on ranks of its own, with the same folder."""

import contextlib
import functools
import os
import sys
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy, _init_utils
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy, size_based_auto_wrap_policy

import rows
from rows import BATCH, INNER, WIDTH, Net


class Down(nn.Linear):
    """What mixed precision may leave alone: a part of it computes without parameters."""

    def forward(self, x):
        return super().forward(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 0.1))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, INNER)
        self.down = Down(INNER, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


def make_model(row, weights):
    """The model before it is wrapped, and a param_init_fn where the row asks for one."""
    if not row.get("param_init_fn"):
        model = Net(Block).double()
        with torch.no_grad():
            for _, parameter, part in rows.parts(model, weights):
                parameter.copy_(part)
        return model, None
    with torch.device("meta"):
        model = Net(Block).double()
    named = {name: part for name, _, part in rows.parts(model, weights)}
    paths = {id(module): path for path, module in model.named_modules()}

    def init(module):
        module.to_empty(device="cpu", recurse=False)
        with torch.no_grad():
            for name, parameter in module.named_parameters(recurse=False):
                parameter.copy_(named[f"{paths[id(module)]}.{name}"])

    return model, init


POLICIES = {
    "the blocks": ModuleWrapPolicy({Block}),
    "by size": functools.partial(size_based_auto_wrap_policy, min_num_params=100),
    "by a smaller size": functools.partial(size_based_auto_wrap_policy, min_num_params=50),
    "a function": lambda module, recurse, nonwrapped_numel: recurse or isinstance(module, nn.Linear) and nonwrapped_numel > 50,
    "CustomPolicy": CustomPolicy(lambda module: isinstance(module, Down)),
    "None": None,
}


def ignored_of(model, row):
    """FSDP1's arguments, and the parameters that it leaves alone."""
    modules = [model.get_submodule(name) for name in row.get("ignored_modules", ())]
    states = [named(model, name) for name in row.get("ignored_states", ())]
    left_alone = {below for each in modules + states
                  for below in (each.parameters() if isinstance(each, nn.Module) else [each])}
    return ({"ignored_modules": modules} if modules else {"ignored_states": states} if states else {}), left_alone


def named(model, name):
    parameters = dict(model.named_parameters())
    return parameters[name] if name in parameters else model.get_submodule(name)


def group_of(row, rank):
    """This rank's; every rank makes all of them."""
    groups = [(ranks, dist.new_group(ranks)) for ranks in row.get("process_group", ())]
    own = next((group for ranks, group in groups if rank in ranks), None)
    if not row.get("is_pair"):
        return own
    # (shard, replicate): the other group's ranks in the same places.
    across = [dist.new_group(list(ranks)) for ranks in zip(*row["process_group"])]
    return own, next(group for group, ranks in zip(across, zip(*row["process_group"])) if rank in ranks)


def clip(parameters, row, group, max_norm=0.5):
    """FSDP1's clip_grad_norm_, which refuses float64. Returns the global norm."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    total = sum((gradient.square().sum() for gradient in gradients), torch.zeros((), dtype=torch.float64))
    if row.get("sharding_strategy") != "NO_SHARD":
        dist.all_reduce(total, group=group)
    norm = total.sqrt().item()
    for gradient in gradients:
        gradient.mul_(min(1.0, max_norm / (norm + 1e-6)))
    return norm


def without_gpu(row):
    """FSDP1 refuses to broadcast states on the CPU, which gloo could; it pins memory, which needs a GPU to pin it for,
    and waits for the stream of its copies, which the CPU's is not made for."""
    around = contextlib.ExitStack()
    if row.get("sync_module_states"):
        around.enter_context(mock.patch.object(_init_utils, "_check_module_states_for_sync_module_states"))
    if row.get("cpu_offload"):
        around.enter_context(mock.patch.object(torch.Tensor, "pin_memory", lambda tensor, *_: tensor))
        around.enter_context(mock.patch.object(torch.cpu.Stream, "synchronize", create=True))
    return around


def train(row, weights, inputs, rank, size):
    with without_gpu(row):
        return train_there(row, weights, inputs, rank, size)


def train_there(row, weights, inputs, rank, size):
    model, param_init_fn = make_model(row, weights + rank if row.get("sync_module_states") else weights)
    prefetch = row.get("backward_prefetch", "BACKWARD_PRE")
    mesh = None
    if row.get("mesh_2d") or row.get("one_node"):
        # On CPU, FSDP1 cannot count a node's devices by itself, as hybrid_mesh() does.
        shape = (1, size) if row.get("one_node") else (2, size // 2)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    group = group_of(row, rank)
    shard_group = mesh.get_group("shard") if mesh else group[0] if isinstance(group, tuple) else group
    names = [name for name, _ in model.named_parameters()]
    ignored, left_alone = ignored_of(model, row)
    half = None
    if row.get("exempt"):
        model = model.float()
        half = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, _module_classes_to_ignore=(Down,))
    model = FullyShardedDataParallel(
        model,
        mixed_precision=half,
        sharding_strategy=ShardingStrategy[row.get("sharding_strategy", "FULL_SHARD")],
        process_group=group,
        device_mesh=mesh,
        auto_wrap_policy=POLICIES[row.get("auto_wrap_policy", "the blocks")],
        backward_prefetch=None if prefetch == "None" else BackwardPrefetch[prefetch],
        forward_prefetch=row.get("forward_prefetch", False),
        limit_all_gathers=row.get("limit_all_gathers", True),
        sync_module_states=row.get("sync_module_states", False),
        cpu_offload=CPUOffload(offload_params=row.get("cpu_offload", False)),
        param_init_fn=param_init_fn,
        use_orig_params=row.get("use_orig_params", False),
        device_id=torch.device("cpu"),  # FSDP1 on CPU wants it in any case
        **ignored,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms = [], []
    for batch in inputs[rank]:
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        norms.append(clip([each for each in model.parameters() if each not in left_alone], row, shard_group))
        optimizer.step()
        losses.append(loss.item())
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        # FSDP1 registers anew what it shows, behind what it was told to ignore.
        shown = {name.replace("_fsdp_wrapped_module.", ""): value for name, value in model.named_parameters()}
        final = torch.cat([shown[name].detach().flatten() for name in names])
    return {"losses": losses, "norms": norms, "weights": final.tolist(), "options": options_of(model)}


def options_of(model):
    """Those that FSDP1 has kept, as a row names them."""
    prefetch = model.backward_prefetch
    return {"sharding_strategy": model.sharding_strategy.name,
            "backward_prefetch": prefetch.name if prefetch else "None",
            "forward_prefetch": model.forward_prefetch,
            "limit_all_gathers": model.limit_all_gathers,
            "cpu_offload": model.cpu_offload.offload_params,
            "use_orig_params": model._use_orig_params}


def results_of(all_rows, weights, inputs, rank, size):
    inputs = inputs.view(size, -1, BATCH, WIDTH)
    return {row["name"]: train(row, weights, inputs, rank, size) for row in all_rows}


if __name__ == "__main__":
    rows.run("fsdp1", results_of)
    sys.stdout.flush()
    os._exit(0)
