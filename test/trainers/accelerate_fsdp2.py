"""Trains through accelerate with fsdp_version=2.

Usage: accelerate_fsdp2.py [--rows NAMES] RECORD_FOLDER
"""

import os
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from accelerate import ParallelismConfig
from accelerate.utils import TorchDynamoPlugin, merge_fsdp_weights
from safetensors.torch import load_file
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaForCausalLM

import accelerate_cpu
import models
import rows


def train(accelerator, model, optimizer, scheduler, loader):
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()))
    return losses


def prepared(accelerator, model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    return accelerator.prepare(model, optimizer, scheduler, DataLoader(models.tokens(), batch_size=4))


def trained(accelerator, model):
    parts = prepared(accelerator, model)
    losses = [train(accelerator, *parts) for _ in range(2)]
    return {"losses": losses, "weights": accelerator.get_state_dict(parts[0]), **rows.described(parts[0])}


def plain(folder, steps=1, precision="no", model=None, **options):
    accelerator = accelerate_cpu.accelerator(accelerate_cpu.plugin(**options), mixed_precision=precision,
                                             gradient_accumulation_steps=steps)
    return trained(accelerator, models.llama() if model is None else model)


class Stack(nn.Module):
    """Its blocks are no list of modules, which accelerate would wrap as one more that is large enough."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(models.VOCABULARY, 32)
        self.first, self.second = (nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(2))
        self.output = nn.Linear(32, models.VOCABULARY)

    def forward(self, input_ids, labels):
        logits = self.output(self.second(self.first(self.tokens(input_ids))))
        return SimpleNamespace(loss=F.cross_entropy(logits.flatten(0, 1), labels.flatten()))


def sized(folder, model):
    return plain(folder, model=model, auto_wrap_policy="size_based_wrap", min_num_params=2100,
                 transformer_cls_names_to_wrap=None)


def tied(folder):
    return plain(folder, model=models.llama(tie_word_embeddings=True))


def efficient(folder):
    """Rank 0 reads the weights; the other has a model without."""
    if dist.get_rank() == 0:
        models.llama().save_pretrained(folder / "model")
    dist.barrier()
    plugin = accelerate_cpu.plugin(cpu_ram_efficient_loading=True)
    with mock.patch.dict(os.environ, ACCELERATE_USE_FSDP="true"):
        model = LlamaForCausalLM.from_pretrained(folder / "model")
    return trained(accelerate_cpu.accelerator(plugin), model)


def ignored(folder):
    """Each rank has a norm of its own from the first step on: of what is ignored, gradients are not reduced."""
    accelerator = accelerate_cpu.accelerator(accelerate_cpu.plugin(ignored_modules=r"model\.layers\.\d\.input_layernorm"))
    parts = prepared(accelerator, models.llama())
    losses = []
    for batch in parts[3]:
        losses.append(parts[0](input_ids=batch, labels=batch).loss)
        accelerator.backward(losses[-1])
        parts[1].step()
        parts[1].zero_grad()
    return {"losses": losses, "weights": dict(parts[0].named_parameters()), **rows.described(parts[0])}


def saved(folder, kind):
    """Steps that follow a checkpoint are taken twice: in this run, and after it is read back."""
    accelerator = accelerate_cpu.accelerator(accelerate_cpu.plugin(state_dict_type=kind))
    parts = prepared(accelerator, models.llama())
    train(accelerator, *parts)
    accelerator.save_state(folder / "checkpoint")
    losses = train(accelerator, *parts)
    accelerator.load_state(folder / "checkpoint")
    again = train(accelerator, *parts)
    assert rows.exact(losses) == rows.exact(again)
    record = {"losses": losses, "weights": accelerator.get_state_dict(parts[0]), **rows.described(parts[0])}
    if kind == "SHARDED_STATE_DICT":
        merge_fsdp_weights(str(folder / "checkpoint" / "pytorch_model_fsdp_0"), str(folder / "merged"))
        record["merged"] = load_file(folder / "merged" / "model.safetensors")
    return record


def exported(folder):
    """A fresh model reads what save_model wrote, unsharded."""
    accelerator = accelerate_cpu.accelerator(accelerate_cpu.plugin())
    parts = prepared(accelerator, models.llama())
    losses = train(accelerator, *parts)
    accelerator.save_model(parts[0], folder / "exported")
    accelerator.wait_for_everyone()
    return {"losses": losses, "weights": load_file(folder / "exported" / "model.safetensors"), **rows.described(parts[0])}


def compiled(folder, regional):
    accelerator = accelerate_cpu.accelerator(
        accelerate_cpu.plugin(), dynamo_plugin=TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=regional))
    return trained(accelerator, models.llama())


# The lines that accelerate's quick tour adds to a training loop, with that loop.
QUICK_TOUR = """
from accelerate import Accelerator
accelerator = Accelerator()
model, optimizer, training_dataloader, scheduler = accelerator.prepare(model, optimizer, training_dataloader, scheduler)
for batch in training_dataloader:
    optimizer.zero_grad()
    inputs, targets = batch
    outputs = model(inputs)
    loss = loss_function(outputs, targets)
    accelerator.backward(loss)
    optimizer.step()
    scheduler.step()
"""


def quick_tour(folder):
    """With the variables that `accelerate launch` sets."""
    accelerate_cpu.forget()
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True), 2)
    model = nn.Sequential(nn.Embedding(models.VOCABULARY, 16), encoder, nn.Linear(16, models.VOCABULARY))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses, tokens = [], models.tokens()

    def loss_function(outputs, targets):
        losses.append(F.cross_entropy(outputs.flatten(0, 1), targets.flatten()))
        return losses[-1]

    names = {"model": model, "optimizer": optimizer, "loss_function": loss_function,
             "training_dataloader": DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=2),
             "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)}
    with mock.patch.dict(os.environ, ACCELERATE_USE_CPU="true", ACCELERATE_USE_FSDP="true", FSDP_VERSION="2",
                         FSDP_AUTO_WRAP_POLICY="TRANSFORMER_BASED_WRAP",
                         FSDP_TRANSFORMER_CLS_TO_WRAP="TransformerEncoderLayer"):
        exec(QUICK_TOUR, names)
    model = names["model"]
    return {"losses": losses, "weights": dict(model.named_parameters()), **rows.described(model)}


def hybrid(folder):
    """On four ranks: two replicas of two shards."""
    accelerator = accelerate_cpu.accelerator(accelerate_cpu.plugin(), parallelism_config=ParallelismConfig(
        dp_replicate_size=2, dp_shard_size=2))
    return trained(accelerator, models.llama())


ROWS = {
    "quick_tour": quick_tour,
    "plain": plain,
    "bf16": lambda folder: plain(folder, precision="bf16"),
    "fp16": lambda folder: plain(folder, precision="fp16"),
    "accumulation": lambda folder: plain(folder, steps=2),
    "no_reshard": lambda folder: plain(folder, reshard_after_forward=False),
    "activation_checkpointing": lambda folder: plain(folder, activation_checkpointing=True),
    "activation_offload": lambda folder: plain(folder, activation_checkpointing=True, activation_checkpointing_offload=True),
    "cpu_offload": lambda folder: plain(folder, cpu_offload=CPUOffloadPolicy(pin_memory=False)),
    "cpu_offload_pinned": lambda folder: plain(folder, cpu_offload=True),
    "size_based_wrap": lambda folder: sized(folder, Stack()),
    "size_based_wrap_of_list": lambda folder: sized(folder, models.llama()),
    "no_wrap": lambda folder: plain(folder, auto_wrap_policy="no_wrap", transformer_cls_names_to_wrap=None),
    "tied": tied,
    "ignored_modules": ignored,
    "efficient_loading": efficient,
    "saved_sharded": lambda folder: saved(folder, "SHARDED_STATE_DICT"),
    "saved_full": lambda folder: saved(folder, "FULL_STATE_DICT"),
    "exported": exported,
    "compiled_blocks": lambda folder: compiled(folder, True),
    "compiled_whole": lambda folder: compiled(folder, False),
}

if __name__ == "__main__":
    accelerate_cpu.shard_on_cpus()
    rows.main(ROWS)
