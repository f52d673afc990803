"""The policies: torch's own where this torch has them, or classes below them, so that either kind may be passed."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Callable

import torch
import torch.nn as nn
from torch.distributed.fsdp._fully_shard._fsdp_api import CPUOffloadPolicy, OffloadPolicy

# What is accepted: this package's is a class below it.
from torch.distributed.fsdp._fully_shard._fsdp_api import MixedPrecisionPolicy as AnyMixedPrecisionPolicy
from torch.distributed.tensor import Shard

_has_override = "param_dtype_override_fn" in {field.name for field in dataclasses.fields(AnyMixedPrecisionPolicy)}


@dataclass(frozen=True)
class MixedPrecisionPolicy(AnyMixedPrecisionPolicy):
    """torch's, with what FSDP1 has beside it.

    param_dtype_override_fn: (parameter) -> param_dtype, its own dtype, or None for the former. buffer_dtype: of floating-point
    buffers, but for exempt modules; None: their own. State dicts and checkpoints have them in their own. full_precision_in_eval:
    param_dtype and buffer_dtype apply to training only: while the module's `training` is false, parameters are gathered in their own dtype,
    buffers have theirs, and inputs are not cast. The mode may change between steps only, on all ranks alike;
    FSDP_USE_FULL_PREC_IN_EVAL=1 in the environment sets it in every policy. is_exempt: (module) -> whether it computes in full
    precision, with all below it but for sharded modules: its parameters keep their dtype, and its forward gets floating-point
    inputs in that dtype and gives outputs back in the inputs'. A wrap policy makes such a module a unit.
    """

    if not _has_override:
        param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = dataclasses.field(
            default=None, kw_only=True)
    buffer_dtype: torch.dtype | None = dataclasses.field(default=None, kw_only=True)
    full_precision_in_eval: bool = dataclasses.field(default=False, kw_only=True)
    is_exempt: Callable[[nn.Module], bool] | None = dataclasses.field(default=None, kw_only=True)


try:
    from torch.distributed.fsdp._fully_shard._fsdp_api import DataParallelMeshDims  # type: ignore[attr-defined]
except ImportError:

    @dataclass(frozen=True)
    class DataParallelMeshDims:  # type: ignore[no-redef]
        """Which dimensions of a larger mesh shard (`shard`) and which replicate (`replicate`), by name."""

        shard: str | tuple[str, ...] | None = None
        replicate: str | tuple[str, ...] | None = None

        def __post_init__(self):
            if self.shard is None and self.replicate is None:
                raise ValueError("DataParallelMeshDims: expected names of dimensions that shard, that replicate, or "
                                 "both; got neither")

        @property
        def shard_names(self) -> tuple[str, ...]:
            return _names(self.shard)

        @property
        def replicate_names(self) -> tuple[str, ...]:
            return _names(self.replicate)

try:
    from torch.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult  # type: ignore[attr-defined]
except ImportError:

    @dataclass
    class ShardPlacementResult:  # type: ignore[no-redef]
        """What shard_placement_fn may return: a cut (None: Shard(0)) and the mesh that it is over, as an object with
        the attribute `mesh`, or the mesh itself."""

        placement: Shard | None
        mesh_info: Any


def _names(names):
    if names is None:
        return ()
    return (names,) if isinstance(names, str) else tuple(names)


try:
    from torch.distributed.fsdp._fully_shard._fully_shard import GradientReductionHandle  # type: ignore[attr-defined]
except ImportError:

    class GradientReductionHandle:  # type: ignore[no-redef]
        """What torch's class of this name is from 2.15 on: the base of the handles."""

        def wait(self) -> None:
            """Waits for nothing."""


__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "GradientReductionHandle",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ShardPlacementResult",
]
