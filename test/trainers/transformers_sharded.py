"""Models that transformers itself shards while it reads them: from_pretrained with a DistributedConfig.

Usage: transformers_sharded.py [--rows NAMES] RECORD_FOLDER
"""

import torch
import torch.distributed as dist
from transformers import LlamaForCausalLM
from transformers.distributed import DistributedConfig

import models
import rows


def read(folder, model=None, **more):
    if dist.get_rank() == 0:
        (models.llama() if model is None else model).save_pretrained(folder)
    dist.barrier()
    return LlamaForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(**{"fsdp_size": 2, **more}))


def trained(folder, clips=True, **more):
    model = read(folder / "model", **more)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(4):
        batch = models.tokens(rows=4, seed=10 * step + dist.get_rank())
        losses.append(model(input_ids=batch, labels=batch).loss)
        losses[-1].backward()
        if clips:  # which torch cannot where parameters have more than one mesh
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    record = {"losses": losses, "weights": rows.exact(dict(model.named_parameters())), **rows.described(model)}
    model.eval()
    record["generated"] = model.generate(models.tokens(rows=2, length=4), max_new_tokens=6, do_sample=False)
    model.save_pretrained(folder / "saved")
    dist.barrier()
    return {**record, "read": LlamaForCausalLM.from_pretrained(folder / "saved").state_dict()}


ROWS = {
    "fsdp": trained,
    "tied": lambda folder: trained(folder, model=models.llama(tie_word_embeddings=True)),
    "mixed_precision": lambda folder: trained(folder, fsdp_mixed_precision=True),
    "hsdp": lambda folder: trained(folder, fsdp_size=1, dp_replicate_size=2),
    "whole_layers": lambda folder: trained(folder, fsdp_plan={"model.layers.*": "keep_full_weight"}),
}

if __name__ == "__main__":
    rows.main(ROWS)
