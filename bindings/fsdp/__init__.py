"""`fully_shard` for PyTorch, run by libfsdp's C++ scheduler.

Takes the place of the functions and classes of the same names in `torch.distributed.fsdp`:

    from fsdp import fully_shard
"""

import torch

try:
    from . import _C
except ImportError as error:
    # Another torch than the extension was built with lacks its symbols, or has others.
    from ._build import TORCH_VERSION

    if torch.__version__.split("+")[0].split(".")[:2] == TORCH_VERSION.split(".")[:2]:
        raise
    raise ImportError(
        f"fsdp was built with torch {TORCH_VERSION}, but this is torch {torch.__version__}; install fsdp again "
        "in this environment"
    ) from error

if torch.__version__.split("+")[0].split(".")[:2] != _C.torch_version.split(".")[:2]:
    raise ImportError(
        f"fsdp was built with torch {_C.torch_version}, but this is torch {torch.__version__}; install fsdp again "
        "in this environment"
    )

from ._C import CommError, Error
from ._api import CPUOffloadPolicy, DataParallelMeshDims, MixedPrecisionPolicy, OffloadPolicy
from ._fully_shard import fully_shard, register_fsdp_forward_method, share_comm_ctx
from ._module import FSDPModule, GradientReductionHandle, UnshardHandle

__all__ = [
    "CPUOffloadPolicy",
    "CommError",
    "DataParallelMeshDims",
    "Error",
    "FSDPModule",
    "GradientReductionHandle",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]
