"""The model of memory and gloo_step, in PyTorch: the twin of bench/bench_models.cpp."""

import torch


class MlpBlock(torch.nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.norm = torch.nn.LayerNorm(dim)
        self.up = torch.nn.Linear(dim, hidden)
        self.down = torch.nn.Linear(hidden, dim)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class MlpModel(torch.nn.Module):
    def __init__(self, blocks, dim, hidden, vocabulary):
        super().__init__()
        self.embedding = torch.nn.Embedding(vocabulary, dim)
        self.blocks = torch.nn.ModuleList(MlpBlock(dim, hidden) for _ in range(blocks))
        self.norm = torch.nn.LayerNorm(dim)
        self.head = torch.nn.Linear(dim, vocabulary)

    def forward(self, tokens):
        """Mean cross-entropy of predicting `tokens` from themselves."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return torch.nn.functional.cross_entropy(self.head(self.norm(x)), tokens)


def shard(model, mesh, fully_shard):
    """Shards every block, then the root, which keeps its own parameters between forward and backward."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh, reshard_after_forward=False)


def parameter_bytes(module):
    return sum(parameter.nbytes for parameter in module.parameters())
