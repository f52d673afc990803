"""Small models of transformers and their tokens, the same on every rank and in every run."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 64


def llama(**more):
    torch.manual_seed(0)
    sizes = dict(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=4)
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **more}))


def tokens(rows=16, length=16, seed=1):
    return torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))
