"""Training with torchao's weights that say how FSDP2 gathers them.

Usage: torchao_weights.py [--rows NAMES] RECORD_FOLDER
"""

import functools

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

import rows

WIDTH = 256  # nf4: 64 values make a block, 256 of these another; half of the rows are to be whole ones


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Adapted(nn.Module):
    """A frozen linear layer in 4 bits with a trained one of low rank beside it (QLoRA)."""

    def __init__(self, linear):
        super().__init__()
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4, to_nf4

        self.compute = linear_nf4
        self.weight = nn.Parameter(to_nf4(linear.weight.detach(), 64, 64), requires_grad=False)
        self.a = nn.Linear(linear.in_features, 8, bias=False)
        self.b = nn.Linear(8, linear.out_features, bias=False)

    def forward(self, x):
        return self.compute(input=x, weight=self.weight) + self.b(self.a(x))


def convert(model, row):
    if row in ("float8", "float8_precomputed"):
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        convert_to_float8_training(model, config=Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True))
    elif row == "nf4":
        for block in model:
            block.up, block.down = Adapted(block.up), Adapted(block.down)
    else:
        import torchao.prototype.quantized_training as training
        from torchao import quantize_

        quantize_(model, {"int8_mixed_precision": training.Int8MixedPrecisionTrainingConfig,
                          "int8_quantized": training.int8_weight_only_quantized_training,
                          "bitnet": training.bitnet_training}[row]())


def after_step(model, row):
    if row == "float8_precomputed":
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        precompute_float8_dynamic_scale_for_fsdp(model)
    if row == "bitnet":
        from torchao.prototype.quantized_training import precompute_bitnet_scale_for_fsdp

        precompute_bitnet_scale_for_fsdp(model)


def contents(tensor):
    """Of a local tensor a digest of what it holds; of a subclass those of its tensors."""
    if hasattr(tensor, "__tensor_flatten__"):
        return {name: contents(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0]}
    return rows.digests([("bits", tensor.reshape(-1))])


def sharded(row, compute=torch.float32, offload=OffloadPolicy()):
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    convert(model, row)
    options = {"mp_policy": MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32), "offload_policy": offload}
    for block in model:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def optimizer_of(model):
    return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3, weight_decay=0,
                             foreach=False)


def train(model, optimizer, row):
    after_step(model, row)
    losses = []
    torch.manual_seed(dist.get_rank())
    for _ in range(4):
        losses.append(model(torch.randn(32, WIDTH)).float().square().mean())
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
        after_step(model, row)
    local = {name: each.to_local() for name, each in model.named_parameters()}
    return {"losses": losses, "weights": {name: contents(each) for name, each in local.items()},
            "kinds": {name: type(each).__name__ for name, each in local.items()}, **rows.described(model)}


def trained(folder, row, **options):
    model = sharded(row, **options)
    return train(model, optimizer_of(model), row)


def classes_of(model):
    """What checkpoints may name, of weights: their classes and those of what these keep."""
    local = [each.to_local() for each in model.parameters()]
    kept = [each for weight in local for each in vars(weight).values()]
    return list({type(each) for each in (*local, *kept) if type(each).__module__.startswith("torchao.")})


def restored(folder, row):
    """A checkpoint goes to a model and an optimizer that are new."""
    model, other = sharded(row), sharded(row)
    optimizer, other_optimizer = optimizer_of(model), optimizer_of(other)
    before = train(model, optimizer, row)
    try:
        dcp.save(dict(zip(("model", "optimizer"), get_state_dict(model, optimizer))), checkpoint_id=folder / "saved")
    except CheckpointException as error:  # which is no Exception
        raise RuntimeError(str(error)) from error
    state = dict(zip(("model", "optimizer"), get_state_dict(other, other_optimizer)))
    with torch.serialization.safe_globals(classes_of(model)):
        dcp.load(state, checkpoint_id=folder / "saved")
    set_state_dict(other, other_optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return {"before": before["losses"], **train(other, other_optimizer, row)}


KINDS = "float8", "float8_precomputed", "int8_mixed_precision", "int8_quantized", "bitnet", "nf4"
ROWS = {
    **{kind: functools.partial(trained, row=kind) for kind in KINDS},
    **{f"{kind}_bf16": functools.partial(trained, row=kind, compute=torch.bfloat16) for kind in KINDS},
    **{f"{kind}_offloaded": functools.partial(trained, row=kind, offload=CPUOffloadPolicy(pin_memory=False)) for kind in KINDS},
    **{f"{kind}_restored": functools.partial(restored, row=kind) for kind in KINDS},
}

if __name__ == "__main__":
    rows.main(ROWS)
