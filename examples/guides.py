"""What the pages of docs/ show in Python, as they show it: a test looks for each of their blocks here.

    torchrun --nproc-per-node 2 guides.py
"""

import copy
import os
import shutil
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import fsdp
from fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard, replicate


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def sharded(**options):
    model = Model()
    for module in [*model.blocks, model]:
        fully_shard(module, **options)
    return model


def train_one_step(model):
    model(torch.randn(2, 16)).square().mean().backward()
    return 1.0


def sharding(mesh):
    model = Model()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)

    model = Model()
    plan = fsdp.plan_wrapping(model, fsdp.wrap_class(Block), mesh=mesh)
    print(plan)
    fsdp.apply_wrapping(plan)

    model = Model()
    fully_shard(model, mesh=mesh, shard_placement_fn=lambda parameter: Shard(parameter.dim() - 1))

    model = sharded(mesh=mesh)
    whole = model.head.weight.full_tensor()  # a collective call
    average = copy.deepcopy(model)  # sharded like the original
    assert whole.shape == (4, 16) and isinstance(average, fsdp.FSDPModule)

    with fsdp.FullParameters(model), torch.no_grad():  # all ranks
        model.head.weight[3] = 0  # the same on all ranks
    assert model.head.weight.full_tensor()[3].count_nonzero() == 0

    model = replicate(Model(), mesh=init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("replicate",)))
    train_one_step(model)


def mixed_precision(mesh):
    model = Model()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in [*model.blocks, model]:
        fully_shard(module, mesh=mesh, mp_policy=policy)
    assert model(torch.randn(2, 16)).dtype == torch.bfloat16


def memory(mesh):
    model = Model()
    for module in [*model.blocks, model]:
        fully_shard(module, mesh=mesh, offload_policy=CPUOffloadPolicy())
    train_one_step(model)

    model = sharded(mesh=mesh)
    model.set_unsharded_byte_budget(1 << 20)
    train_one_step(model)


def accumulation(mesh):
    model = sharded(mesh=mesh)
    micro_batches = 4
    for i in range(micro_batches):
        model.set_requires_gradient_sync(i + 1 == micro_batches)
        (model(torch.randn(2, 16)).square().mean() / micro_batches).backward()
    assert model.head.weight.grad is not None


def meta(mesh):
    with torch.device("meta"):
        model = Model()
    for module in [*model.blocks, model]:
        fully_shard(module, mesh=mesh)
    fsdp.materialize(model, seed=1)

    with torch.device("meta"):
        model = Model()
    for module in [*model.blocks, model]:
        fully_shard(module, mesh=mesh)
    model.to_empty(device="cpu")
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.reset_parameters()

    model = Model() if dist.get_rank() == 0 else Model().to("meta")
    for module in [*model.blocks, model]:
        fully_shard(module, mesh=mesh, sync_from_rank0=True)


def checkpoints(mesh):
    model = sharded(mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    train_one_step(model)
    optimizer.step()
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    run = folder[0]

    fsdp.save_checkpoint(f"{run}/step-100", model, optimizer, {"epoch": 2}, keep_last=3)
    if path := fsdp.latest_checkpoint(run):
        extra = fsdp.load_checkpoint(path, model, optimizer).extra
    assert extra == {"epoch": 2}

    saver = fsdp.CheckpointSaver()
    for step in range(200, 203):
        train_one_step(model)
        saver.start_save(f"{run}/step-{step}", model, optimizer, {"epoch": 3}, keep_last=3)
    saver.wait()  # raises what a save failed with
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(run)


def optimizers(mesh):
    model = sharded(mesh=mesh)
    optimizer = torch.optim.AdamW(fsdp.local_shards(model), fused=True)
    loss = model(torch.randn(2, 16)).square().mean()
    loss.backward()
    fsdp.clip_grad_norm_(fsdp.local_shards(model), 1.0)
    optimizer.step()


def extensions(mesh):
    model = Model()
    int8 = fsdp.int8_all_gather(block_numel=128)
    fully_shard(model, mesh=mesh,
                all_gather_extension_fn=lambda name, parameter: int8 if parameter.dim() > 1 else None)
    train_one_step(model)


def communication(mesh):
    model = sharded(mesh=mesh)
    model.set_separate_reduce_scatter_group()
    model.set_reduce_scatter_max_input_buffers(2)  # one more than groups are gathered ahead
    model.choose_reduce_scatter_start(lambda: train_one_step(model))


def inspection(mesh):
    model = sharded(mesh=mesh)
    for _ in range(2):
        train_one_step(model)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        with fsdp.timeline(model, path="rank{rank}.json"):
            train_one_step(model)
        report = fsdp.report(model)
        print(report)
        report.to_html("report.html")
        print(model.statistics())  # for W&B or TensorBoard
        os.chdir("/")


def checks(mesh):
    model = Model()
    fully_shard(model, mesh=mesh, sanitizer=fsdp.SanitizerOptions())
    fsdp.set_schedule_check(model, late_after=timedelta(seconds=10))
    train_one_step(model)


def replacing(mesh):
    with fsdp.replace_torch():
        from torch.distributed.fsdp import fully_shard as torchs

        model = Model()
        torchs(model, mesh=mesh)
        assert isinstance(model, fsdp.FSDPModule)


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for guide in (sharding, mixed_precision, memory, accumulation, meta, checkpoints, optimizers, extensions, communication, inspection,
                  checks, replacing):
        torch.manual_seed(1)  # the same first values on all ranks
        guide(mesh)
    print(f"rank {dist.get_rank()}: all guides ran", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
