"""Llama models as stacks of groups: what each holds and computes.

Sizes: 7B is Llama 2's (arXiv 2307.09288, and its published configuration), 8B, 70B and 405B are Llama 3.1's
(arXiv 2407.21783, table 3).
"""

from dataclasses import dataclass

BF16_BYTES = 2
PIECE_BYTES = 16  # every rank's part of a parameter begins at a multiple of that


@dataclass(frozen=True)
class Llama:
    name: str
    layers: int
    hidden: int
    feed_forward: int
    key_value: int  # rows of the key and value projections
    vocabulary: int
    sequence: int
    batch: int  # sequences a GPU and step
    hybrid_shard: int  # ranks of a shard group of HSDP: the fewest whole nodes, by powers of 2, whose memory it fits in

    @property
    def tokens(self):
        return self.sequence * self.batch

    def layer_shapes(self):
        """Norms' vectors, 0.01% of a layer or less, are left out: a stand-in has no place for them."""
        wide, narrow = [self.hidden, self.hidden], [self.key_value, self.hidden]
        return [wide, narrow, narrow, wide, [self.feed_forward, self.hidden], [self.feed_forward, self.hidden],
                [self.hidden, self.feed_forward]]

    def vocabulary_shapes(self):
        return [[self.vocabulary, self.hidden]]

    @property
    def parameters(self):
        return self.layers * elements(self.layer_shapes()) + 2 * elements(self.vocabulary_shapes())

    def layer_flops(self):
        """Forward of one GPU's tokens: two operations a parameter, and attention over half of the sequence."""
        return self.tokens * (2 * elements(self.layer_shapes()) + 2 * self.sequence * self.hidden)

    def head_flops(self):
        return self.tokens * 2 * elements(self.vocabulary_shapes())

    def model_flops(self):
        """Of one GPU and step, without what is computed again: three times the forward."""
        return 3 * (self.layers * self.layer_flops() + self.head_flops())

    def activation_bytes(self):
        """Full checkpointing: the layers' inputs, and one layer's activations at 34 bytes a token and hidden element
        (arXiv 2205.05198, without the attention matrix, which a fused attention never stores). Logits are
        not counted: the loss is taken in chunks."""
        return self.tokens * self.hidden * (BF16_BYTES * self.layers + 34)

    def stand_in_factor(self):
        """How many columns one column may stand for: pieces of one row stay multiples of `PIECE_BYTES`."""
        factor = 1
        columns = PIECE_BYTES // BF16_BYTES
        while all(size % (2 * factor * columns) == 0 for size in (self.hidden, self.feed_forward)):
            factor *= 2
        return factor


def elements(shapes):
    return sum(rows * columns for rows, columns in shapes)


def narrowed(shapes, factor):
    """Every row's columns divided: rows, and how ranks share and pad them, stay what they are."""
    return [[rows, columns // factor] for rows, columns in shapes]


LLAMAS = {model.name: model for model in (
    Llama("7B", 32, 4096, 11008, 4096, 32000, sequence=4096, batch=2, hybrid_shard=8),
    Llama("8B", 32, 4096, 14336, 1024, 128256, sequence=8192, batch=2, hybrid_shard=8),
    Llama("70B", 80, 8192, 28672, 1024, 128256, sequence=8192, batch=1, hybrid_shard=32),
    Llama("405B", 126, 16384, 53248, 1024, 128256, sequence=8192, batch=1, hybrid_shard=1024),
)}
