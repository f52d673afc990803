"""The policies: torch's own where this torch has them, so that either kind may be passed."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Callable

import torch
import torch.nn as nn
from torch.distributed.fsdp._fully_shard._fsdp_api import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import Shard

# What is accepted: also a policy of torch's own class where this package's is one below it.
AnyMixedPrecisionPolicy = MixedPrecisionPolicy

if "param_dtype_override_fn" not in {field.name for field in dataclasses.fields(MixedPrecisionPolicy)}:

    @dataclass(frozen=True)
    class MixedPrecisionPolicy(MixedPrecisionPolicy):  # type: ignore[no-redef]
        """torch's, with a dtype for each parameter: (parameter) -> param_dtype, its own dtype, or None for the
        former."""

        param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = dataclasses.field(
            default=None, kw_only=True)


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
