"""The policies: torch's own where this torch has them, so that either kind may be passed."""

from dataclasses import dataclass

from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

try:
    from torch.distributed.fsdp import DataParallelMeshDims
except ImportError:

    @dataclass(frozen=True)
    class DataParallelMeshDims:
        """Which dimensions of a larger mesh shard (`shard`) and which replicate (`replicate`), by name."""

        shard: str | tuple[str, ...] | None = None
        replicate: str | tuple[str, ...] | None = None


__all__ = ["CPUOffloadPolicy", "DataParallelMeshDims", "MixedPrecisionPolicy", "OffloadPolicy"]
