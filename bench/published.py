"""Throughput of FSDP on H100s as others have published it."""

from dataclasses import dataclass

SOURCE = "github.com/pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3"


@dataclass(frozen=True)
class Row:
    """Tokens a GPU and second, on two numbers of GPUs with the same batch on each."""

    name: str
    model: str
    found_on: int
    found: float
    predicted_on: int
    published: float
    backward: float  # of a layer, in forwards: with what is computed again


# Llama 3.1 8B, bfloat16, two sequences of 8,192 a GPU, selective activation checkpointing, which computes about half of a
# forward again. H100s of 500 W with HBM2e, nodes of eight with 400 Gb/s a GPU.
ROWS = (
    Row("FSDP2", "8B", 8, 5762, 128, 5605, backward=2.5),
    Row("FSDP2 + torch.compile", "8B", 8, 6667, 128, 6514, backward=2.5),
)


def share_that_gives(tokens_per_s, predict, tolerance=1e-4):
    """The share of the peak at which `predict(share)` is that. Where nothing waits for communication, it grows as the share
    does, and elsewhere less: so each try comes closer. ValueError where even the whole peak is too slow."""
    share = 0.5
    while share <= 1:
        found = predict(share)
        if abs(found / tokens_per_s - 1) < tolerance:
            return share
        share *= tokens_per_s / found
    raise ValueError(f"expected a throughput that the peak allows, found {tokens_per_s} tokens a second")
