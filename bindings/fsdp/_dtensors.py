"""DTensors over the memory of the core's registered parameters and gradients."""

import weakref

import torch
import torch.nn as nn
from torch.distributed._composable.contract import _get_registry
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils.weak import WeakIdKeyDictionary

from . import _C


def _make_parameter(local, mesh, placements, sizes, strides, requires_grad):
    meta = TensorMeta(torch.Size(sizes), tuple(strides), local.dtype)
    spec = DTensorSpec(mesh, placements, tensor_meta=meta)
    return nn.Parameter(DTensor(local, spec, requires_grad=False), requires_grad=requires_grad)


def _make_gradient(local, parameter):
    spec = parameter._spec
    if spec.tensor_meta.dtype != local.dtype:
        meta = TensorMeta(spec.tensor_meta.shape, spec.tensor_meta.stride, local.dtype)
        spec = DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)


def _is_left_out(module):
    registry = _get_registry(module)
    return registry is not None and "replicate" in registry


def _placements(mesh, dim):
    placement = Replicate() if dim is None else Shard(dim)
    return (Replicate(),) * (mesh.ndim - 1) + (placement,)


def install():
    _C.set_python_side(_make_parameter, _make_gradient, WeakIdKeyDictionary(ref_type=weakref.ref), _is_left_out,
                       _placements)
