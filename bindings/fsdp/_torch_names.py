"""torch's own names that this package puts its own in the place of, from the modules that define them: what other
modules give these names to may be another library's, or this package's, by now."""

import inspect

from torch.distributed.fsdp._fully_shard import __all__ as _public
from torch.distributed.fsdp._fully_shard import _fsdp_api, _fully_shard

try:
    from torch.distributed._composable.replicate_with_fsdp import ReplicateModule as TorchReplicateModule
    from torch.distributed._composable.replicate_with_fsdp import replicate as _replicate
except ImportError:  # before torch 2.10
    _replicate, TorchReplicateModule = None, _fully_shard.FSDPModule  # type: ignore[assignment, misc]

# By name: what torch makes public of its fully_shard, and its replicate on the same engine.
OWN = {name: getattr(_fully_shard, name, None) or getattr(_fsdp_api, name) for name in _public}
if _replicate is not None:
    OWN.update(ReplicateModule=TorchReplicateModule, replicate=_replicate)

from torch.distributed.fsdp._fully_shard._fully_shard import FSDPModule, UnshardHandle, fully_shard  # noqa: E402

# What torch's states are kept by: the function behind its decorator.
fully_shard_key = inspect.unwrap(fully_shard)
replicate_keys = () if _replicate is None else (inspect.unwrap(_replicate),)

__all__ = ["FSDPModule", "OWN", "TorchReplicateModule", "UnshardHandle", "fully_shard_key", "replicate_keys"]
