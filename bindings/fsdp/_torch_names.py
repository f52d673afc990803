"""torch's own names that this package puts its own in the place of, as they are when it is imported: a program may give
the names in `torch.distributed.fsdp` to this package's functions and classes afterwards."""

import inspect

from torch.distributed.fsdp import FSDPModule, UnshardHandle, fully_shard

# What torch's states are kept by: the function behind its decorator.
fully_shard_key = inspect.unwrap(fully_shard)

__all__ = ["FSDPModule", "UnshardHandle", "fully_shard_key"]
