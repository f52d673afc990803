"""torch's own names that this package puts its own in the place of, from the modules that define them: what other
modules give these names to may be another library's, or this package's, by now."""

import inspect

from torch.distributed.fsdp._fully_shard import __all__ as _public
from torch.distributed.fsdp._fully_shard import _fsdp_api, _fully_shard

# By name: what torch makes public of its fully_shard.
OWN = {name: getattr(_fully_shard, name, None) or getattr(_fsdp_api, name) for name in _public}

from torch.distributed.fsdp._fully_shard._fully_shard import FSDPModule, UnshardHandle, fully_shard  # noqa: E402

# What torch's states are kept by: the function behind its decorator.
fully_shard_key = inspect.unwrap(fully_shard)

__all__ = ["FSDPModule", "OWN", "UnshardHandle", "fully_shard_key"]
