"""DTensors over the memory of the core's sharded parameters, gradients and unsharded parameters."""

import copy
import weakref

import torch
import torch.nn as nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

from . import _C
from ._functional_call import is_in_functional_call
from ._hooked import stand_in
from ._spmd_types import Annotation, paused

# Equal ones are one object, as long as a tensor has it: DTensor then looks up its cached hash only, and the many
# like modules of a model need few. By the mesh's id, which the spec keeps alive.
_specs: weakref.WeakValueDictionary = weakref.WeakValueDictionary()


def spec_of(mesh, placements, meta):
    key = (id(mesh), placements, meta)
    spec = _specs.get(key)
    if spec is None:
        spec = _specs[key] = DTensorSpec(mesh, placements, tensor_meta=meta)
    return spec


def _in_dtype(spec, dtype):
    if spec.tensor_meta.dtype == dtype:
        return spec
    return spec_of(spec.mesh, spec.placements, spec.tensor_meta._replace(dtype=dtype))


def make_parameter(local, spec, requires_grad):
    # What nn.Parameter makes of a DTensor, less a detach through DTensor's dispatch.
    parameter = DTensor.__new__(DTensor, local, spec, requires_grad=requires_grad)
    parameter._is_param = True
    return parameter


def copy_parameter(parameter, memo):
    """Another one over the same memory, until the copy's sharded parameter is there."""
    local = DTensor(parameter._local_tensor.detach(), parameter._spec, requires_grad=False)
    new = nn.Parameter(local, requires_grad=parameter.requires_grad)
    new.__dict__.update(copy.deepcopy(parameter.__dict__, memo))
    return new


def _make_unsharded(local, like, requires_grad):
    if isinstance(like, Annotation):
        return nn.Parameter(local, requires_grad=requires_grad)
    return make_parameter(local, _in_dtype(like._spec, local.dtype), requires_grad)


def _make_post_forward(local, mesh, dim, geometry, requires_grad):
    """geometry: (sizes, strides) of the whole, cut along `dim` over the mesh's last dimension."""
    sizes, strides = geometry
    placements = (Replicate(),) * (mesh.ndim - 1) + (Shard(dim),)
    spec = spec_of(mesh, placements, TensorMeta(torch.Size(sizes), tuple(strides), local.dtype))
    return nn.Parameter(DTensor(local, spec, requires_grad=False), requires_grad=requires_grad)


def _local_gradient(gradient, placements):
    """The local tensor of a DTensor placed as `placements` say; None among them: as it is there. An Annotation: of a plain
    gradient of such a parameter."""
    if isinstance(placements, Annotation):
        return placements.local_gradient(gradient)
    placements = tuple(now if wanted is None else wanted for now, wanted in zip(gradient.placements, placements))
    if placements != gradient.placements:
        with paused():
            gradient = gradient.redistribute(placements=placements)
    local = gradient._local_tensor
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def _replicates_ordinary():
    return DTensor._op_dispatcher._allow_implicit_replication


def install():
    _C.set_python_side({
        "dtensor": DTensor,
        "in_dtype": _in_dtype,
        "make_unsharded": _make_unsharded,
        "make_post_forward": _make_post_forward,
        "local_gradient": _local_gradient,
        "replicates_ordinary": _replicates_ordinary,
        "mirrors": WeakIdKeyDictionary(ref_type=weakref.ref),
        "local_tensors": WeakTensorKeyDictionary(),
        "stand_in": stand_in,
        "is_in_functional_call": is_in_functional_call,
    })
