"""`fully_shard` for PyTorch, run by libfsdp's C++ scheduler.

Takes the place of the functions and classes of the same names in `torch.distributed.fsdp`:

    from fsdp import fully_shard

or, in libraries that import torch's, by `fsdp.replace_torch()` or `python -m fsdp train.py`.
"""

import torch

from ._build import TORCH_VERSION, VERSION as __version__

# Before the extension is loaded: with another torch it would find other symbols, or the same with other layouts.
if torch.__version__.split("+")[0].split(".")[:2] != TORCH_VERSION.split(".")[:2]:
    raise ImportError(
        f"fsdp was built with torch {TORCH_VERSION}, but this is torch {torch.__version__}; install fsdp again in this "
        "environment"
    )

from ._C import CheckpointError, CommError, Error, ScheduleError
from ._all_gather_extension import AllGatherExtension, int8_all_gather
from ._api import CPUOffloadPolicy, DataParallelMeshDims, MixedPrecisionPolicy, OffloadPolicy, ShardPlacementResult
from ._checkpoint import (CheckpointSaver, LoadCheckpointOptions, LoadedCheckpoint, SaveCheckpointOptions, latest_checkpoint,
                          load_checkpoint, save_checkpoint)
from ._debugging import SanitizerOptions, set_schedule_check
from ._forward_hooks import register_fsdp_forward_method
from ._full_parameters import FullParameters
from ._fully_shard import fully_shard, share_comm_ctx
from ._local_shards import LocalShardPart, clip_grad_norm_, local_shards
from ._logs import install as _install_logs
from ._materialize import Initializer, ModuleInitializer, initializer, materialize
from ._meshes import hybrid_mesh
from ._module import FSDPModule, GradientReductionHandle, UnshardHandle, roots
from ._optimizer_state import load_optimizer_state_dict, optimizer_state_dict
from ._replicate import ReplicateModule, replicate
from ._replace_torch import TorchReplacement, replace_torch, restore_torch
from ._report import BudgetOutlook, GroupReport, Report, StepReport, report
from ._report_step import Collective, HeldBytes, Residency, StepRecord, Wait
from ._timeline import Timeline, TimelineBytes, TimelineEvent, timeline
from ._whereabouts import install as _install_whereabouts
from ._wrap_policy import WrapCandidate, WrapPolicy, wrap_by_size, wrap_class, wrap_if
from ._wrapping import PlannedUnit, WrapPlan, apply_wrapping, plan_wrapping

_install_logs()
_install_whereabouts()

# The extension makes these without.
Error.__doc__ = """What libfsdp raises itself for a call at a wrong time; a RuntimeError. Wrong arguments are
ValueErrors and TypeErrors, torch's own errors and those of a program's hooks and functions pass as they are."""
CommError.__doc__ = """A collective that failed. The process group is unusable afterwards.

operation, subject, group: what failed ("all_gather"), for what ("blocks.3"), in which group; "" where that is not known.
rank, size: of the group; -1 and 0 where that is not known."""
ScheduleError.__doc__ = """The ranks of a root did not launch the same collectives in the same order, or one of them has gone:
names what each of them did, by module, the same on all ranks. The process groups are unusable afterwards.

collective: the number of the first one that differs; None where replicas began with different values.
launched: what each rank of the root launched as that one, by its rank in the world."""
CheckpointError.__doc__ = """A checkpoint that cannot be written or read: a full disk, a damaged file, a folder that the
ranks do not share. Names the file, the tensor and the bytes; all ranks of a call raise it together."""

__all__ = [
    "AllGatherExtension",
    "BudgetOutlook",
    "CPUOffloadPolicy",
    "CheckpointError",
    "CheckpointSaver",
    "Collective",
    "CommError",
    "DataParallelMeshDims",
    "Error",
    "FSDPModule",
    "FullParameters",
    "GradientReductionHandle",
    "GroupReport",
    "HeldBytes",
    "Initializer",
    "LoadCheckpointOptions",
    "LoadedCheckpoint",
    "LocalShardPart",
    "MixedPrecisionPolicy",
    "ModuleInitializer",
    "OffloadPolicy",
    "PlannedUnit",
    "ReplicateModule",
    "Report",
    "Residency",
    "SanitizerOptions",
    "SaveCheckpointOptions",
    "ScheduleError",
    "ShardPlacementResult",
    "StepRecord",
    "StepReport",
    "Timeline",
    "TimelineBytes",
    "TimelineEvent",
    "TorchReplacement",
    "UnshardHandle",
    "Wait",
    "WrapCandidate",
    "WrapPlan",
    "WrapPolicy",
    "apply_wrapping",
    "clip_grad_norm_",
    "fully_shard",
    "hybrid_mesh",
    "initializer",
    "int8_all_gather",
    "latest_checkpoint",
    "load_checkpoint",
    "load_optimizer_state_dict",
    "local_shards",
    "materialize",
    "optimizer_state_dict",
    "plan_wrapping",
    "register_fsdp_forward_method",
    "replace_torch",
    "replicate",
    "report",
    "restore_torch",
    "roots",
    "save_checkpoint",
    "set_schedule_check",
    "share_comm_ctx",
    "timeline",
    "wrap_by_size",
    "wrap_class",
    "wrap_if",
]
