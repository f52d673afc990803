"""A training program for torch's FSDP2, which knows nothing of fsdp: a small Transformer, mixed precision, prefetch, clipping
and full state dicts.

Usage: torch_tutorial.py RECORD_FOLDER
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

import rows


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        normed = self.norm1(x)
        x = x + self.attention(normed, normed, normed, need_weights=False)[0]
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self, vocabulary=64, dim=32, heads=4, layers=3, context=16):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, dim), nn.Embedding(context, dim)
        self.layers = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm, self.output = nn.LayerNorm(dim), nn.Linear(dim, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.size(1)))
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x)).float()

    def loss(self, tokens):
        return F.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def build(mesh):
    torch.manual_seed(0)
    model = Transformer()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    register_fsdp_forward_method(model, "loss")
    for layer, following in zip(model.layers, model.layers[1:]):
        layer.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([layer])
    assert isinstance(model, FSDPModule)
    return model


def train(model, steps=6):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(100 + dist.get_rank())
    losses = []
    for step in range(steps):
        model.set_requires_gradient_sync(step % 2 == 1)  # two backwards for a step of the optimizer
        loss = model.loss(torch.randint(64, (4, 17)))
        loss.backward()
        losses.append(loss.item())
        if step % 2 == 1:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
    return losses


def tutorial(folder):
    model = build(init_device_mesh("cpu", (dist.get_world_size(),)))
    losses = train(model)
    described = rows.described(model)
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return {"losses": losses, "weights": weights, **described}


ROWS = {"tutorial": tutorial}

if __name__ == "__main__":
    rows.main(ROWS)
