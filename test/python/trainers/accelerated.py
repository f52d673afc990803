"""A training program for accelerate with FSDP2, which knows nothing of fsdp: a small model of transformers, accumulation,
clipping, a checkpoint of model and optimizer that is read back, and the state dict of the whole model.

Usage: accelerated.py [--efficient] [--half] RECORD_FOLDER
"""

import argparse
import json
import os

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, PartialState
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM


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
        losses.append(accelerator.gather(loss.detach()).tolist())
    return losses


def shard_on_cpus(accelerator, plugin):
    """What accelerate does with an FSDP plugin on accelerators; on CPUs it takes DistributedDataParallel."""
    PartialState().distributed_type = accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    if accelerator.mixed_precision != "no":
        plugin.set_mixed_precision(accelerator.mixed_precision)
    assert accelerator.is_fsdp2


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--efficient", action="store_true")
    parser.add_argument("--half", action="store_true")
    parser.add_argument("folder")
    arguments = parser.parse_args()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        state_dict_type="SHARDED_STATE_DICT", cpu_ram_efficient_loading=arguments.efficient)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=2,
                              mixed_precision="bf16" if arguments.half else "no")
    shard_on_cpus(accelerator, plugin)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                                         num_attention_heads=4, num_key_value_heads=4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    loader = DataLoader(torch.randint(64, (32, 16)), batch_size=4)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses = train(accelerator, model, optimizer, scheduler, loader)
    accelerator.save_state(os.path.join(arguments.folder, "checkpoint"))
    train(accelerator, model, optimizer, scheduler, loader)
    accelerator.load_state(os.path.join(arguments.folder, "checkpoint"))
    losses += train(accelerator, model, optimizer, scheduler, loader)
    weights = {name: tensor.tolist() for name, tensor in accelerator.get_state_dict(model).items()}
    record = {"losses": losses, "weights": weights, "state": type(fully_shard.state(model)).__module__,
              "classes": [f"{each.__module__}.{each.__qualname__}" for each in type(model).__mro__]}
    with open(os.path.join(arguments.folder, f"{dist.get_rank()}.json"), "w") as file:
        json.dump(record, file)
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
