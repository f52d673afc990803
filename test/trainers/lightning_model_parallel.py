"""Trains with Lightning's ModelParallelStrategy, whose user calls fully_shard in configure_model.

Usage: lightning_model_parallel.py [--rows NAMES] RECORD_FOLDER
"""

import logging

import lightning
import torch
import torch.nn as nn
import torch.nn.functional as F
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader

import models
import rows

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(lightning.LightningModule):
    """Of `layers` blocks, sharded over the dimension of Lightning's mesh that is named, or over both as HSDP."""

    def __init__(self, over="data_parallel", policy=None, compiled=False, tensor_parallel=False):
        super().__init__()
        self.over, self.policy, self.compiled, self.tensor_parallel = over, policy, compiled, tensor_parallel
        self.losses = []
        torch.manual_seed(0)
        self.tokens, self.output = nn.Embedding(models.VOCABULARY, 32), nn.Linear(32, models.VOCABULARY)
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def configure_model(self):
        mesh = self.device_mesh[self.over]
        for index, layer in enumerate(self.layers):
            if self.tensor_parallel:
                parallelize_module(layer, self.device_mesh["tensor_parallel"], {"up": ColwiseParallel(),
                                                                                "down": RowwiseParallel()})
            if self.compiled:
                layer = self.layers[index] = torch.compile(layer, backend="aot_eager")
            fully_shard(layer, mesh=mesh, mp_policy=self.policy or MixedPrecisionPolicy())
        fully_shard(self, mesh=mesh, mp_policy=self.policy or MixedPrecisionPolicy())

    def forward(self, batch):
        x = self.tokens(batch[:, :-1])
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.output(x).flatten(0, 1).float(), batch[:, 1:].flatten())

    def training_step(self, batch):
        loss = self(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch):
        self.log("validated", self(batch), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)}

    def train_dataloader(self):
        return DataLoader(models.tokens(rows=32), batch_size=4)

    def val_dataloader(self):
        return DataLoader(models.tokens(rows=8, seed=2), batch_size=4)


def trainer(folder, data=2, tensor=1, distributed=True, **more):
    strategy = ModelParallelStrategy(data, tensor, save_distributed_checkpoint=distributed)
    options = dict(accelerator="cpu", devices=data * tensor, strategy=strategy, max_epochs=1, logger=False,
                   default_root_dir=folder, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False)
    return lightning.Trainer(**{**options, **more})


def record(made, model):
    return {"losses": model.losses, "weights": dict(model.named_parameters()),
            "validated": {name: value.item() for name, value in made.callback_metrics.items()}, **rows.described(model)}


def trained(folder, model=None, **more):
    model = Model() if model is None else model
    made = trainer(folder, **more)
    made.fit(model)
    return record(made, model)


def resumed(folder, distributed):
    """The second epoch after a checkpoint is the second of a run that was not interrupted."""
    whole = Model()
    trainer(folder, distributed=distributed, max_epochs=2).fit(whole)
    first = trainer(folder, distributed=distributed)
    first.fit(Model())
    first.save_checkpoint(folder / "checkpoint")
    model = Model()
    second = trainer(folder, distributed=distributed, max_epochs=2)
    second.fit(model, ckpt_path=str(folder / "checkpoint"))
    assert model.losses == whole.losses[len(whole.losses) // 2:]
    return {**record(second, model), "is_folder": (folder / "checkpoint").is_dir()}


def hybrid(folder, data, tensor):
    """Both dimensions of Lightning's mesh, the first of which replicates."""
    return trained(folder, Model(over=("data_parallel", "tensor_parallel")), data=data, tensor=tensor)


ROWS = {
    "plain": trained,
    "bf16": lambda folder: trained(folder, Model(policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))),
    "bf16_true": lambda folder: trained(folder, precision="bf16-true"),
    "accumulation": lambda folder: trained(folder, accumulate_grad_batches=2),
    "clipping": lambda folder: trained(folder, gradient_clip_val=0.5),
    "compiled": lambda folder: trained(folder, Model(compiled=True)),
    "hsdp_replicates": lambda folder: hybrid(folder, 2, 1),
    "hsdp_shards": lambda folder: hybrid(folder, 1, 2),
    "tensor_parallel": lambda folder: trained(folder, Model(tensor_parallel=True), data=1, tensor=2),
    "resumed_distributed": lambda folder: resumed(folder, True),
    "resumed_full": lambda folder: resumed(folder, False),
}

if __name__ == "__main__":
    rows.main(ROWS)
