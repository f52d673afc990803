"""What a checkpoint holds of a model, as the core takes it: local tensors, sizes of the whole, and held ranges."""

import warnings
from typing import Any

import torch
import torch.nn as nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from . import _C
from ._buffer_dtypes import saved_dtypes
from ._names import named_tensors, without_wrappers


def model_section(model, dtype=None):
    """dtype: that floating-point tensors have in the file; None: their own."""
    for name, below in model.named_modules():
        if type(below).get_extra_state is not nn.Module.get_extra_state:
            warnings.warn(f"checkpoint: the extra state of {name or 'the model'} ({type(below).__name__}) is no tensor "
                          "of the model and is left out; save it in `extra`", stacklevel=4)
    own = {without_wrappers(name): dtype for name, dtype in saved_dtypes(model).items()}
    return [entry(names[0], tensor, names[1:], dtype or own.get(names[0]) if tensor.is_floating_point() else None)
            for names, tensor in named_tensors(model)]


def entry(name: str, tensor: torch.Tensor, other_names=(), dtype=None, like=None) -> dict[str, Any]:
    """One tensor of a section. `like`: the DTensor whose elements `tensor`, a plain one, holds on this rank; without it
    a DTensor holds its own and a plain tensor is the whole."""
    spread = like if like is not None else tensor
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if isinstance(local, AsyncCollectiveTensor):
        local = local.wait()
    if is_traceable_wrapper_subclass(local):
        over = "DTensor over a " if local is not tensor else ""
        raise ValueError(f"checkpoint: '{name}' is a {over}{type(local).__name__}; expected a plain tensor or a DTensor over "
                         "one. Convert it to a plain one first")
    is_sharded = isinstance(spread, DTensor)
    return {"name": name, "local": local,
            "sizes": list(spread.shape), "ranges": _held_ranges(name, spread) if is_sharded else None,
            "other_names": list(other_names), "dtype": dtype}


def _held_ranges(name, tensor):
    spec = tensor._spec
    coordinates = spec.mesh.get_coordinate()
    cuts = [_cut(name, placement) for placement in spec.placements]
    if coordinates is None:
        return []  # other ranks hold it
    return _C.held_ranges(list(tensor.shape), list(spec.mesh.shape), list(coordinates), cuts)


def _cut(name, placement):
    if isinstance(placement, Replicate):
        return None
    if isinstance(placement, Partial):
        raise ValueError(f"checkpoint: '{name}' has the placement {placement}, so that no rank has its values; "
                         "redistribute it first")
    return placement.dim, placement.split_factor if isinstance(placement, _StridedShard) else 1
