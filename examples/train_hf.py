"""Trains a model of Hugging Face's transformers, sharded over all ranks, on the text of a file.

    torchrun --nproc-per-node 2 train_hf.py [FILE]
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

import fsdp
from fsdp import fully_shard

STEPS, ROWS, CONTEXT = 30, 8, 64


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group()
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    torch.manual_seed(1)  # the same first values on all ranks: each keeps its part of its own
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=192, num_hidden_layers=3)).to(device)
    for module in [*model.model.layers, model]:
        fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    with open(sys.argv[1] if len(sys.argv) > 1 else torch.__file__, "rb") as file:
        text = torch.tensor(list(file.read())).chunk(mesh.size())[mesh.get_rank()]  # each rank its own part
    for step in range(STEPS):
        batch = text[torch.randint(len(text) - CONTEXT, (ROWS, 1)) + torch.arange(CONTEXT)].to(device)
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        fsdp.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        print(f"step {step}, rank {mesh.get_rank()}: loss {loss.item():.3f}", flush=True)
    if mesh.get_rank() == 0:
        print(fsdp.report(model))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
