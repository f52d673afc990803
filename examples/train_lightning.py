"""Lightning's ModelParallelStrategy over libfsdp: configure_model calls this package's fully_shard in place of torch's.

    python train_lightning.py     # Lightning starts the ranks: two on CPUs
"""

import lightning
import torch
import torch.nn as nn
import torch.nn.functional as F
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.utils.data import DataLoader

import fsdp
from fsdp import fully_shard


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3)])
        self.head = nn.Linear(16, 1)
        self.losses = []

    def configure_model(self):
        if isinstance(self, fsdp.FSDPModule):  # Lightning calls this again for validation and tests
            return
        for block in self.blocks:
            fully_shard(block, mesh=self.device_mesh["data_parallel"])
        fully_shard(self, mesh=self.device_mesh["data_parallel"])

    def training_step(self, x):
        loss = F.mse_loss(self.head(self.blocks(x)), x.mean(1, keepdim=True))
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main():
    model = Model()
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, logger=False,
                                enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(model, DataLoader(torch.randn(320, 16), batch_size=8))
    print(f"rank {trainer.global_rank}: loss {model.losses[0]:.3f} -> {model.losses[-1]:.3f}", flush=True)


if __name__ == "__main__":
    main()
