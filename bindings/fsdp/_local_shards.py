"""One long tensor for all parameters of a group that are treated alike, for optimizers: local shards."""

from dataclasses import dataclass
from typing import Callable, Iterable

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor, Partial

from . import _C
from ._module import FSDPModule
from ._module import roots as outermost_sharded


@dataclass(frozen=True)
class LocalShardPart:
    """Where a parameter lies in a local shard."""

    name: str  # of the parameter, from the root
    parameter: nn.Parameter  # the DTensor
    offset: int  # of its first element
    numel: int  # that this rank holds


def local_shards(
    module: nn.Module, label: Callable[[str, nn.Parameter], str] | None = None
) -> list[nn.Parameter]:
    """This rank's part of all parameters as few plain 1-D nn.Parameters, for fused optimizers: one for each group,
    dtype, trainable or not, and label, in depth-first order. An optimizer takes either these or the parameters:

        optimizer = torch.optim.AdamW(fsdp.local_shards(model), fused=True)
        ...
        loss.backward()
        fsdp.clip_grad_norm_(fsdp.local_shards(model), 1.0)  # torch's would clip by this rank's norm
        optimizer.step()

    They are the parameters' memory: a write to either is one to both. When backward ends, their `.grad` is there, and
    the parameters' `.grad` are views of it; parameters without a gradient have zeros in it. Between the parts
    lies padding: zero, with zero gradients. `zero_grad` of the optimizer, or of the module, before the next backward
    resets both.

    label: (name, parameter) -> str, the same on all ranks. Each has the attributes `label`, `module_name` (of the
    sharded module, "" for the root) and `parts` (LocalShardPart, by offset). `optimizer_state_dict` names its
    state by parameters.

    The first call puts the parameters in order (no communication) and fixes them: dtype and device may still
    change, but a requires_grad that is changed afterwards makes the next step raise. Later calls return the same
    tensors. Outside a step. ValueError for other labels than before, or where nothing is sharded; RuntimeError
    inside a step.
    """
    roots = outermost_sharded(module)
    if not roots:
        raise ValueError(f"local_shards: expected a module that holds sharded ones, found {type(module)} with none; "
                         "call fully_shard first")
    return [_as_parameter(local) for local in _C.local_shards([root._core() for root in roots], label)]


def _as_parameter(local):
    # The core's own tensor, so that the gradients are its gradients: nn.Parameter(shard) would be another one.
    shard = local["shard"]
    shard.__class__ = nn.Parameter
    shard.label = local["label"]
    shard.module_name = local["module"]
    shard.parts = [LocalShardPart(**part) for part in local["parts"]]
    return shard


def _check_not_partial(parameters):
    for given in parameters:
        for parameter in [part.parameter for part in getattr(given, "parts", ())] or [given]:
            if isinstance(parameter, DTensor) and any(isinstance(each, Partial) for each in parameter.placements):
                raise ValueError(f"clip_grad_norm_: a parameter has the placements {parameter.placements}, so that no rank has "
                                 "its gradient; leave it out, or clip it by itself")


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """torch.nn.utils.clip_grad_norm_ for local shards, parameters of sharded modules and plain tensors (which every
    rank holds whole) together: by their global norm, which it returns, the same on every rank. A collective call.

    norm_type: as torch takes it; 0 counts the gradients with an element that is not zero, by parameters.
    The norm is a tensor of the default dtype without dimensions, on the mesh's device, and on a GPU nothing waits for it.
    foreach: torch chooses its kernels by it; it changes nothing here.

    RuntimeError if the norm is not finite and `error_if_nonfinite`; ValueError for a parameter that is a partial sum, whose
    gradient's norm no rank has. The gradients are as they were then.
    """
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    _check_not_partial(parameters)
    norm = _C.clip_grad_norm_(parameters, max_norm, float(norm_type), error_if_nonfinite)
    return norm.to(torch.get_default_dtype())
