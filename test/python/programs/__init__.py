"""Programs for FSDP2's public interface. Each is run with torch's fully_shard and with ours, unchanged, and what
they return is compared: losses, gradients, sharded parameters, state dicts, errors.

A program is a function (api, ranks) -> a nested value of tensors, DTensors, numbers, strings, lists and dicts.
`api` has the public names of torch.distributed.fsdp, from one side or the other.
"""

from . import (
    annotated,
    arguments,
    around,
    attached,
    between_steps,
    communication,
    construction,
    controls,
    gradient_dtypes,
    gradients,
    initialized,
    meshes,
    observed,
    placed,
    process_groups,
    recomputed,
    registered,
    replicated,
    saved,
    states,
    wrong_arguments,
)
from .common import PROGRAMS

__all__ = [
    "PROGRAMS",
    "annotated",
    "arguments",
    "around",
    "attached",
    "between_steps",
    "communication",
    "construction",
    "controls",
    "gradient_dtypes",
    "gradients",
    "initialized",
    "meshes",
    "observed",
    "placed",
    "process_groups",
    "recomputed",
    "registered",
    "replicated",
    "saved",
    "states",
    "wrong_arguments",
]
