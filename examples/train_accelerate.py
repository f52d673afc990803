"""accelerate's FSDP2 plugin over libfsdp: the program is what it is without, and `-m fsdp` in front of it is all that changes.

    torchrun --nproc-per-node 2 -m fsdp train_accelerate.py

It needs an accelerator: on CPUs accelerate shards nothing, whatever its plugin says. The program says so then, and
ends with exit code 1.
"""

import accelerate
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch.distributed.fsdp import FSDPModule
from transformers import LlamaConfig, LlamaForCausalLM

STEPS = 20


def main():
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"])
    accelerator = Accelerator(fsdp_plugin=plugin)
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                                         num_attention_heads=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows = torch.arange(32).repeat(64, 1) + torch.randint(0, 32, (64, 1))  # counts upwards from somewhere
    loader = torch.utils.data.DataLoader(rows, batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if not isinstance(model, FSDPModule):
        raise SystemExit(f"train_accelerate.py: accelerate {accelerate.__version__} has not sharded the model. It made a "
                         f"{type(model).__name__} on {accelerator.device} (distributed type {accelerator.distributed_type.value}) and "
                         "took no notice of its FSDP plugin, as it does without an accelerator; run this on GPUs, or shard the "
                         "model by fsdp.fully_shard as examples/train_hf.py does")

    losses = []
    while len(losses) < STEPS:
        for batch in loader:
            loss = model(input_ids=batch, labels=batch).loss
            optimizer.zero_grad()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
    kinds = [kind.__module__ for kind in type(model).__mro__ if kind.__name__ == "FSDPModule"]
    print(f"rank {accelerator.process_index}: loss {losses[0]:.3f} -> {losses[-1]:.3f}, sharded by {kinds[:1]}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
