"""DTensors over the memory of the core's registered parameters, gradients and handles."""

import weakref

import torch.nn as nn
from torch.distributed._composable.contract import _get_registry
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils.weak import WeakIdKeyDictionary

from . import _C


def _in_dtype(spec, dtype):
    if spec.tensor_meta.dtype == dtype:
        return spec
    return DTensorSpec(spec.mesh, spec.placements,
                       tensor_meta=TensorMeta(spec.tensor_meta.shape, spec.tensor_meta.stride, dtype))


def _make_gradient(local, parameter):
    return DTensor(local, _in_dtype(parameter._spec, local.dtype), requires_grad=False)


def _make_unsharded(local, like, requires_grad):
    return nn.Parameter(DTensor(local, _in_dtype(like._spec, local.dtype), requires_grad=False),
                        requires_grad=requires_grad)


def _local_gradient(gradient, placements):
    """The local tensor of a DTensor placed as `placements` say; None among them: as it is there."""
    placements = tuple(now if wanted is None else wanted for now, wanted in zip(gradient.placements, placements))
    if placements != gradient.placements:
        gradient = gradient.redistribute(placements=placements)
    local = gradient._local_tensor
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def _is_left_out(module):
    registry = _get_registry(module)
    return registry is not None and "replicate" in registry


def install():
    _C.set_python_side({
        "make_gradient": _make_gradient,
        "make_unsharded": _make_unsharded,
        "local_gradient": _local_gradient,
        "mirrors": WeakIdKeyDictionary(ref_type=weakref.ref),
        "is_left_out": _is_left_out,
        "local_tensors": WeakIdKeyDictionary(ref_type=weakref.ref),
    })
