"""The models of memory and gloo_step, in PyTorch: the twin of bench/bench_models.cpp, and a Llama."""

import torch
import torch.nn.functional as F


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


class LlamaBlock(torch.nn.Module):
    """key_value: rows of the key and value projections, fewer heads than of the query's; none: as many."""

    def __init__(self, dim, hidden, heads=8, key_value=None):
        super().__init__()
        self.heads, self.key_value_heads = heads, heads * (key_value or dim) // dim
        self.attention_norm, self.mlp_norm = torch.nn.RMSNorm(dim), torch.nn.RMSNorm(dim)
        self.q, self.k, self.v, self.out = (torch.nn.Linear(*sizes, bias=False) for sizes in (
            (dim, dim), (dim, key_value or dim), (dim, key_value or dim), (dim, dim)))
        self.gate, self.up = (torch.nn.Linear(dim, hidden, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(hidden, dim, bias=False)

    def forward(self, x, cos, sin):
        y = self.attention_norm(x)
        heads = (self.heads, self.key_value_heads, self.key_value_heads)
        q, k, v = (part(y).unflatten(-1, (number, -1)).transpose(-3, -2)
                   for part, number in zip((self.q, self.k, self.v), heads))
        attended = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True,
                                                  enable_gqa=self.heads != self.key_value_heads)
        x = x + self.out(attended.transpose(-3, -2).flatten(-2))
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def rotate(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class LlamaModel(torch.nn.Module):
    """Nine parameters a block. The same interface as MlpModel's; `tokens` may have a batch dimension, too."""

    def __init__(self, blocks, dim, hidden, vocabulary, heads=8, key_value=None):
        super().__init__()
        self.embedding = torch.nn.Embedding(vocabulary, dim)
        self.blocks = torch.nn.ModuleList(LlamaBlock(dim, hidden, heads, key_value) for _ in range(blocks))
        self.norm = torch.nn.RMSNorm(dim)
        self.head = torch.nn.Linear(dim, vocabulary, bias=False)
        self.head_dim = dim // self.blocks[0].heads

    def forward(self, tokens):
        x = self.embedding(tokens)
        frequencies = 10000.0 ** (-torch.arange(0, self.head_dim, 2, device=x.device) / self.head_dim)
        angles = torch.outer(torch.arange(tokens.shape[-1], device=x.device), frequencies)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, -2), tokens.flatten())


def make(request):
    kind = {"mlp": MlpModel, "llama": LlamaModel}[request["model"]]
    return kind(request["blocks"], request["dim"], request["hidden"], request["vocabulary"])


def shard(model, mesh, fully_shard, reshard_after_forward=True):
    """Shards every block, then the root, which keeps its own parameters between forward and backward."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard_after_forward)
    return fully_shard(model, mesh=mesh, reshard_after_forward=False)


def parameter_bytes(module):
    return sum(parameter.nbytes for parameter in module.parameters())
