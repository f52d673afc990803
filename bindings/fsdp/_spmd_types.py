"""Plain parameters that the package spmd_types annotates: as which DTensor each is stored, and its annotation when modules
compute with it, as FSDP2 has it.

The package is not imported here until somebody else has: a parameter without it has no annotation.
"""

import contextlib
import sys
from dataclasses import dataclass
from typing import Any

from torch.distributed.tensor import DTensor
from torch.distributed.utils import _apply_to_tensors


def _package():
    return sys.modules.get("spmd_types")


def is_annotated(parameter):
    package = _package()
    return package is not None and not isinstance(parameter, DTensor) and bool(package.get_local_type(parameter))


def is_checking():
    package = _package()
    return package is not None and package.is_type_checking()


def paused():
    """What fsdp itself computes is nobody's to check."""
    return _package().no_typecheck() if is_checking() else contextlib.nullcontext()


def without_annotation(attributes):
    """A parameter's attributes, less those of spmd_types: they do not survive deepcopy, and are put on a copy, too."""
    return {name: value for name, value in attributes.items() if name not in ("_local_type", "_partition_spec")}


@dataclass(frozen=True)
class Annotation:
    """Of one parameter."""

    types: dict[Any, Any]  # by axis, of all axes that modules compute on
    partition_spec: Any
    mesh: Any  # as what it is stored: a DTensor on this mesh
    placements: tuple[Any, ...]
    gradient_placements: tuple[Any, ...]  # as what its gradient comes
    reduced: tuple[Any, ...]  # as what it has to go on: on data-parallel dimensions as it came, else as stored

    def __deepcopy__(self, memo):
        return self

    def put_on(self, parameter):
        if self.types and not isinstance(parameter, DTensor):
            _package().assert_type(parameter, dict(self.types), partition_spec=self.partition_spec)

    def stored(self, parameter):
        """The DTensor over the parameter's memory."""
        with paused():
            return DTensor.from_local(parameter.detach(), self.mesh, self.placements, run_check=False)

    def local_gradient(self, gradient):
        with paused():
            gradient = DTensor.from_local(gradient, self.mesh, self.gradient_placements, run_check=False)
            return gradient.redistribute(placements=self.reduced).to_local()


def annotation_of(parameter, over):
    """Of an annotated parameter. over: DataParallel. ValueError where it cannot be stored there."""
    if over.whole is None:
        raise ValueError("fully_shard: a parameter is annotated by spmd_types; expected a mesh with mesh_dim_names, and "
                         "dp_mesh_dims to name those of its dimensions that parameters are sharded or replicated over")
    package, types, mesh = _package(), sys.modules["spmd_types.types"], over.whole
    axes = {name: package.MeshAxis.of(mesh.get_group(name)) for name in mesh.mesh_dim_names}
    local, spec = dict(package.get_local_type(parameter)), package.get_partition_spec(parameter)
    known = {**local, **(types.partition_spec_to_shard_types(spec) if spec is not None else {})}
    data = (*over.shard_names, *over.replicate_names)
    computed_on = _computed_on(local, known, tuple(axes.values()))
    by_name = _types_by_name(known, axes, data)
    to_placement = package.spmd_type_to_dtensor_placement
    placements = tuple(to_placement(each) for each in by_name.values())
    of_gradient = tuple(to_placement(each.backward_type()) for each in by_name.values())
    reduced = tuple(gradient if name in data else placement
                    for name, placement, gradient in zip(by_name, placements, of_gradient))
    return Annotation({axis: local.get(axis, package.R) for axis in computed_on}, spec, mesh, placements, of_gradient, reduced)


def _computed_on(local, known, stored_on):
    """The axes that the parameter is annotated on when modules compute with it."""
    found = tuple(known)
    if not _same_ranks(found, stored_on):
        current = _package().current_mesh()
        if current is None:
            raise ValueError(f"fully_shard: a parameter is annotated by spmd_types on {found} alone, and the mesh has "
                             f"{stored_on}; annotate it on all of these, or call fully_shard under "
                             "spmd_types.set_current_mesh")
        found = tuple(current)
    unknown = tuple(axis for axis in local if axis not in found)
    if unknown:
        raise ValueError(f"fully_shard: a parameter is annotated by spmd_types on {unknown}; expected axes of the mesh that "
                         f"is computed on, {found}")
    if not _same_ranks(found, stored_on):
        raise ValueError(f"fully_shard: a parameter is annotated by spmd_types on {found}; expected axes over the same ranks "
                         f"as the mesh's, {stored_on}")
    return found


def _same_ranks(axes, others):
    normalized = [_package().normalize_mesh(frozenset(each)) for each in (axes, others)]
    if not all(normalized):
        return normalized[0] == normalized[1]
    return _joined(normalized[0]) == _joined(normalized[1])


def _joined(axes):
    return sys.modules["spmd_types._mesh_axis"].flatten_axes(tuple(axes))


def _types_by_name(known, axes, data):
    """The type on each dimension of the mesh. Of those of data parallelism it is R, whether or not it is written there."""
    replicate = _package().R
    data_axis = _joined(axes[name] for name in data)
    others = {axes[name] for name in axes if name not in data}
    for axis, found in known.items():
        if axis <= data_axis:
            if found is not replicate:
                raise ValueError(f"fully_shard: a parameter is annotated by spmd_types as {found} on {axis}, which is "
                                 "data-parallel; expected R, as its gradient is reduced there")
        elif axis not in others:
            raise ValueError(f"fully_shard: a parameter is annotated by spmd_types on {axis}; expected a dimension of the mesh "
                             f"({axes}), or one inside its data-parallel ones")
    missing = [name for name in axes if name not in data and axes[name] not in known]
    if missing:
        raise ValueError(f"fully_shard: a parameter has no annotation by spmd_types on {missing}; expected one on each "
                         "dimension of the mesh that dp_mesh_dims does not name")
    return {name: replicate if name in data else known[axis] for name, axis in axes.items()}


def pre_forward(state, index, args, kwargs):
    """What comes before a forward that spmd_types checks: parameters and what has been cast are annotated."""
    with paused():
        replaced = state.core.pre_forward(index, args, kwargs)
    if replaced is not None:
        for given, cast in zip(_tensors((args, kwargs)), _tensors(replaced)):
            if cast is not given and _package().has_local_type(given):
                _package().assert_type_like(cast, given)
    for module, name, annotation in state.annotated:
        annotation.put_on(module._parameters[name])
    return replaced


def _tensors(value):
    found = []
    _apply_to_tensors(lambda tensor: found.append(tensor) or tensor, value)
    return found
