"""In which form parameters travel in all-gathers."""

import torch

from . import _C, _checks


class AllGatherExtension:
    """How one parameter travels in its group's all-gather in another form than its values: quantised, say. A class of a
    user's derives from this one and defines what has no default; `fully_shard`'s `all_gather_extension_fn` chooses it.

    Before an all-gather every rank turns what it holds into bytes; afterwards what all ranks sent is turned into the values
    that modules compute with. The bytes travel in the group's one collective, beside those of its other parameters.
    Sharded parameters, gradients, optimizer state and checkpoints stay as they are, and so do `full_tensor` and
    FullParameters: they never see encoded values. Where one rank holds the whole parameter nothing is encoded.

    One object may serve many parameters. Its methods run without autograd; what they raise arrives as it is, where the
    gather began, with the group sharded. A parameter with fsdp_pre_all_gather has its own hooks and none of these.
    """

    def name(self) -> str:
        """For messages, such as "int8 in blocks of 64"."""
        return type(self).__name__

    def accepts(self, dtype: torch.dtype) -> bool:
        """Whether a parameter that is kept in `dtype` can be encoded; fully_shard raises ValueError where not. By
        default: floating-point dtypes."""
        return dtype.is_floating_point

    def encoded_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """Bytes that `numel` elements kept in `dtype` become: a function of the arguments alone, as every rank knows from
        it what the others send."""
        raise NotImplementedError(f"{type(self).__name__}: define encoded_bytes(numel, dtype)")

    def pre_all_gather(self, piece: torch.Tensor, encoded: torch.Tensor) -> None:
        """Writes `encoded`, uint8, 1-D, encoded_bytes() long; its memory is aligned to 16 bytes.

        piece: what this rank holds, 1-D, contiguous, in the dtype that it is kept in, followed by zeros where others hold
        more: as many elements on every rank, one or more. The same piece must give the same bytes: backward gathers again
        what forward has seen.
        """
        raise NotImplementedError(f"{type(self).__name__}: define pre_all_gather(piece, encoded)")

    def post_all_gather(self, encoded: torch.Tensor, dtype: torch.dtype, values: torch.Tensor) -> None:
        """Writes `values`, (ranks, elements of a piece), contiguous, in the dtype that modules compute in.

        encoded: (ranks, encoded_bytes()) uint8; each rank's are contiguous and aligned to 16 bytes, and others may lie
        between them. dtype: that the piece was kept in.
        """
        raise NotImplementedError(f"{type(self).__name__}: define post_all_gather(encoded, dtype, values)")


class _OfCore(AllGatherExtension):
    """One that the library has; it calls that itself."""

    def __init__(self, core):
        self._core = core

    def name(self):
        return self._core.name()

    def accepts(self, dtype):
        return self._core.accepts(dtype)

    def encoded_bytes(self, numel, dtype):
        return self._core.encoded_bytes(numel, dtype)

    def pre_all_gather(self, piece, encoded):
        self._core.pre_all_gather(piece, encoded)

    def post_all_gather(self, encoded, dtype, values):
        self._core.post_all_gather(encoded, dtype, values)


def int8_all_gather(*, block_numel: int = 128) -> AllGatherExtension:
    """Gathers floating-point parameters as int8, with one float32 scale for each `block_numel` consecutive elements of a
    piece, which need not be a multiple: 1 + 4 / block_numel bytes an element.

    scale = (largest magnitude of the block) / 127, x' = scale * round(x / scale), computed in float32: |x - x'| <= scale / 2,
    but for rounding. Zeros stay zeros. A block whose largest magnitude is below 127 * FLT_MIN (1.5e-36) becomes zeros. A
    block that holds an infinity or a NaN becomes NaN throughout, so that it shows in the loss.

        fsdp.fully_shard(block, all_gather_extension_fn=lambda name, parameter: int8 if parameter.dim() > 1 else None)

    ValueError if block_numel is less than 1.
    """
    return _OfCore(_C.int8_all_gather(_checks.whole_number(block_numel, "int8_all_gather")))


def extensions_of(function, caller):
    """The function that a user gave, with what it returns checked; None if there is none."""
    _checks.function(function, "all_gather_extension_fn")
    if function is None:
        return None

    def checked(name, parameter):
        extension = function(name, parameter)
        _checks.instance(extension, AllGatherExtension, f"{caller}: all_gather_extension_fn for {name!r}")
        return extension

    return checked
