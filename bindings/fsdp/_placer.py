"""Where each parameter of one call of fully_shard goes: which mesh, which placements, which DTensor shows it."""

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from . import _checks
from ._dtensors import make_parameter, spec_of
from ._hooked import is_gathered_by_hooks
from ._meshes import core_mesh
from ._spmd_types import annotation_of, is_annotated
from ._states import live_states


@dataclass(frozen=True)
class DataParallel:
    """The ranks that one parameter is sharded and replicated over."""

    mesh: DeviceMesh  # (shard), (replicate, shard), or (replicate)
    replicates_only: bool = False
    whole: DeviceMesh | None = None  # dp_mesh_dims: the mesh that they name dimensions of
    shard_names: tuple[str, ...] = ()
    replicate_names: tuple[str, ...] = ()

    def placements(self, shard):
        """shard: the placement on the dimension that shards."""
        last = Replicate() if self.replicates_only else shard
        return (Replicate(),) * (self.mesh.ndim - 1) + (last,)


# What equal plain parameters of equal modules ask for again and again, as long as a tensor has it: by (the mesh's id, which the
# spec keeps alive, whether it replicates only, dim, sizes, strides, dtype).
_plain_specs: weakref.WeakValueDictionary = weakref.WeakValueDictionary()


def data_parallel(mesh, dp_mesh_dims):
    """What fully_shard's arguments mean. A collective call where several names become one dimension."""
    if dp_mesh_dims is None:
        return DataParallel(mesh)
    shard, replicate = dp_mesh_dims.shard_names, dp_mesh_dims.replicate_names
    parts = [_one_dimension(mesh, names) for names in (replicate, shard) if names]
    joined = parts[0] if len(parts) == 1 else DeviceMesh._concatenate(parts)
    return DataParallel(joined, not shard, mesh, tuple(shard), tuple(replicate))


def _one_dimension(mesh, names):
    return mesh[names[0]] if len(names) == 1 else mesh[tuple(names)]._flatten("_".join(names))


class Form:
    """One parameter's place. The base class: a plain tensor. What can fail fails when it is made."""

    def __init__(self, over, parameter, asked):
        self.over = over
        self.parameter = parameter
        self.asked = asked  # Shard, or None: by shard_placement_fn
        self.beside = {}  # mesh dimensions of tensor parallelism: name -> process group

    def spec(self, dim, sizes, strides, dtype):
        """Of the sharded parameter, cut along `dim`; None: replicated. sizes, strides: of what the module held."""
        key = (id(self.over.mesh), self.over.replicates_only, dim, sizes, strides, dtype)
        spec = _plain_specs.get(key)
        if spec is None:
            placements = self.over.placements(Replicate() if dim is None else Shard(dim))
            spec = _plain_specs[key] = spec_of(self.over.mesh, placements, TensorMeta(torch.Size(sizes), strides, dtype))
        return spec

    def tensor_parallel(self):
        """(placements, sizes, names of the mesh's dimensions) of what the module holds; None: it is whole."""
        return None

    def computed_like(self):
        """What modules compute with instead of the unsharded parameter: as `make_unsharded` takes it; None: that itself."""
        return self.parameter if isinstance(self.parameter, DTensor) else None


def _is_sharded(parameter):
    return any(parameter is dtensor for state in live_states for dtensor, _ in state.core.forms())


class TensorParallelForm(Form):
    """A DTensor on a mesh of its own, which shares a root with the data-parallel one."""

    def __init__(self, *place):
        super().__init__(*place)
        held = self.parameter._spec
        if len(held.placements) > 2:
            raise NotImplementedError("fully_shard: a parameter is a DTensor on a mesh of more than two dimensions "
                                      f"({held.placements}); expected one or two (tensor and expert parallelism)")
        try:
            self.mesh = DeviceMesh._concatenate([self.over.mesh, held.mesh])
        except (TypeError, RuntimeError) as error:  # as FSDP2's, which says what torch could not do
            if _is_sharded(self.parameter):
                raise type(error)(f"fully_shard: a parameter is a DTensor on {held.mesh}, sharded already by a call on a "
                                  "module around this one; shard inner modules before outer ones, or name it in "
                                  "ignored_params") from None
            raise type(error)(f"fully_shard: a parameter is a DTensor on {held.mesh}, which cannot stand beside the mesh to "
                              f"shard over, {self.over.mesh} ({error}). If a module around this one is sharded already, shard "
                              "inner modules before outer ones, or name it in ignored_params") from error
        self.beside = {name: held.mesh.get_group(dim) for dim, name in enumerate(held.mesh.mesh_dim_names or ("tp",))}
        self.gradient_placements = held.placements
        _check_placements(held.placements)

    def spec(self, dim, *_):
        held = self.parameter._spec
        shard = Replicate() if dim is None else _placed(dim, held.num_shards_map[dim])
        return spec_of(self.mesh, (*self.over.placements(shard), *held.placements), held.tensor_meta)

    def tensor_parallel(self):
        held = self.parameter._spec
        return _dims(held.placements), list(held.shape), list(self.beside)


class SpmdForm(Form):
    """A DTensor on the whole mesh (dp_mesh_dims), replicated where data parallelism is to shard it."""

    def __init__(self, *place):
        super().__init__(*place)
        held, names = self._held(), self.over.whole.mesh_dim_names
        self.held = held
        if held.mesh is not self.over.whole and held.mesh != self.over.whole:
            raise ValueError(f"fully_shard: a parameter is a DTensor on {held.mesh}; with dp_mesh_dims it has to be on "
                             f"the mesh that was given, {self.over.whole}")
        for name in (*self.over.shard_names, *self.over.replicate_names):
            placement = held.placements[names.index(name)]
            if not isinstance(placement, Replicate):
                raise ValueError(f"fully_shard: expected Replicate() on the data-parallel dimension '{name}' of "
                                 f"{held.mesh}, got {placement}; fully_shard cuts it there itself")
        data = {*self.over.shard_names, *self.over.replicate_names}
        self.others = [dim for dim, name in enumerate(names) if name not in data]
        self.beside = {names[dim]: held.mesh.get_group(dim) for dim in self.others}
        # On data-parallel dimensions a gradient stays what it is: the reduction is ours.
        self.gradient_placements = tuple(
            placement if dim in self.others else None for dim, placement in enumerate(held.placements))
        _check_placements(self._other_placements())
        # Several dimensions that shard are one in the parameter's mesh, where the first of them stood.
        self.joins = len(self.over.shard_names) > 1
        self.first = min((names.index(name) for name in self.over.shard_names), default=None)
        self.mesh = DeviceMesh._concatenate(self._joined_meshes()) if self.joins else held.mesh

    def _held(self):
        return self.parameter._spec

    def _joined_meshes(self):
        mesh = self.over.whole
        return [self.over.mesh if dim == self.first else mesh[mesh.mesh_dim_names[dim]]
                for dim in range(mesh.ndim) if dim == self.first or dim in self.others]

    def _other_placements(self):
        return tuple(self.held.placements[dim] for dim in self.others)

    def spec(self, dim, *_):
        held, over = self.held, self.over
        names = held.mesh.mesh_dim_names
        placements = list(held.placements)
        for name in over.shard_names:
            placements[names.index(name)] = self._strided(dim, names.index(name))
        if self.joins:
            placements = [each for index, placement in enumerate(placements)
                          for each in self._joined_placements(index, placement)]
        return spec_of(self.mesh, tuple(placements), held.tensor_meta)

    def _joined_placements(self, index, placement):
        if index == self.first:
            return self.over.placements(placement)
        return (placement,) if index in self.others else ()

    def _strided(self, dim, index):
        if dim is None:
            return Replicate()
        held, pieces = self.held, 1
        for other in range(index + 1, held.mesh.ndim):
            if other in self.others and getattr(held.placements[other], "dim", None) == dim:
                pieces *= held.mesh.size(other)
        return _placed(dim, pieces)

    def tensor_parallel(self):
        if not self.others:
            return None
        return _dims(self._other_placements()), list(self.held.shape), list(self.beside)


class AnnotatedForm(SpmdForm):
    """A plain tensor that spmd_types annotates: a DTensor on the whole mesh for storage."""

    def _held(self):
        self.annotation = annotation_of(self.parameter, self.over)
        stored = self.annotation.stored(self.parameter)._spec
        return spec_of(self.over.whole, stored.placements, stored.tensor_meta)  # that one's mesh may be another, equal one

    def computed_like(self):
        """None: as it is, where nothing but data parallelism reduces its gradient."""
        return self.annotation if self.annotation.gradient_placements != self.annotation.reduced else None


def _placed(dim, pieces):
    """pieces: that tensor parallelism, on the right, has made of the dimension first."""
    return _StridedShard(dim, split_factor=pieces) if pieces > 1 else Shard(dim)


def _check_placements(placements):
    for placement in placements:
        if not isinstance(placement, (Shard, _StridedShard, Replicate, Partial)):
            raise NotImplementedError(f"fully_shard: a parameter is a DTensor with the placement {placement}; expected "
                                      "Shard, a strided one, Replicate or Partial")


def _dims(placements):
    """As the core is told: what is partial is as whole as what is replicated, and a strided cut has a cut's sizes."""
    return [getattr(placement, "dim", None) for placement in placements]


class Placer:
    """What the extension asks about each parameter of a call, by the parameter as the module holds it."""

    def __init__(self, over: DataParallel, shard_placement_fn, params, is_left_out, hooked_as=None, names=None):
        """hooked_as: of a parameter that is gathered by hooks, (parameter, form) -> HookedParameter. names: for errors, those
        of the call."""
        self._over = over
        self.is_left_out = is_left_out  # (module) -> bool: another composable API owns it
        names = names or _checks.ParameterNames(())
        self._forms = {}
        for parameter in params:
            # Read before the next is asked for: a function may return the same object again, changed.
            asked = shard_placement_fn(parameter) if shard_placement_fn else None
            with names.at(parameter):
                self._forms[id(parameter)] = self._form(parameter, asked)
        self._cores: dict[DeviceMesh, Any] = {}
        forms = [form for form in self._forms.values() if form.beside]
        self.core_mesh = self._core_part(over, forms)
        for form in self._forms.values():
            if form.over is not over:
                self._core_part(form.over, forms)
        self.replicates_only = over.replicates_only
        self.placement_fn = self._placement if shard_placement_fn is not None else None
        self.tensor_parallel_fn = self._tensor_parallel if forms else None
        self._hooked = {id(parameter): hooked_as(parameter, self._forms[id(parameter)]) for parameter in params
                        if is_gathered_by_hooks(parameter)}
        self.has_hooked = bool(self._hooked)
        self.computes_with_plain = not self.has_hooked and all(type(form) is Form for form in self._forms.values())

    def forget(self):
        """The call is over: the parameters may go."""
        self._forms.clear()
        self._hooked.clear()

    def _form(self, parameter, asked):
        over = self._over
        if hasattr(asked, "mesh_info"):  # ShardPlacementResult, torch's or ours
            over = _over_mesh_info(asked.mesh_info, over)
            asked = asked.placement
        if asked is not None:
            _checks.placement(asked, parameter)
        kind = Form
        if is_annotated(parameter):
            kind = AnnotatedForm
        elif over.whole is not None:
            if not isinstance(parameter, DTensor):
                raise ValueError("fully_shard: with dp_mesh_dims all parameters have to be DTensors on the whole mesh "
                                 "(distribute_module makes them), or annotated by spmd_types, and "
                                 "a parameter is neither")
            kind = SpmdForm
        elif isinstance(parameter, DTensor):
            kind = TensorParallelForm
        return kind(over, parameter, asked)

    def _core_part(self, over, forms):
        """The data-parallel dimensions of the core's mesh, which has those of tensor parallelism beside them."""
        if over.mesh not in self._cores:
            beside = {}
            for form in forms:
                if form.over.mesh == over.mesh:
                    beside.update(form.beside)
            self._cores[over.mesh] = core_mesh(over.mesh, beside)
        core = self._cores[over.mesh]
        return core.submesh(list(over.mesh.mesh_dim_names)) if over.mesh.mesh_dim_names else core

    def _placement(self, parameter):
        form = self._forms[id(parameter)]
        dim = form.asked.dim if form.asked is not None else None
        if form.over is self._over:
            return dim
        return dim or 0, self._core_part(form.over, ())

    def _tensor_parallel(self, parameter):
        form = self._forms[id(parameter)]
        held = form.tensor_parallel()
        if held is None:
            return None
        dims, sizes, names = held
        return dims, sizes, self._cores[form.over.mesh].submesh(names)

    def sharded(self, local, parameter, dim, sizes, strides, requires_grad):
        """The DTensor parameter over a sharded parameter's memory. sizes, strides: tuples, of what the module held; dim: None:
        replicated."""
        if (hooked := self.hooked(parameter)) is not None:
            local = hooked.local
        spec = self._forms[id(parameter)].spec(dim, sizes, strides, local.dtype)
        made = make_parameter(local, spec, requires_grad)
        if hooked is not None:
            hooked.parameter = made
        return made

    def hooked(self, parameter):
        """The HookedParameter, or None."""
        return self._hooked.get(id(parameter))

    def annotation(self, parameter):
        """By spmd_types; None: it has none."""
        return getattr(self._forms.get(id(parameter)), "annotation", None)

    def computed_like(self, parameter):
        return self._forms[id(parameter)].computed_like()

    def gradient_placements(self, parameter):
        form = self._forms[id(parameter)]
        return form.annotation if isinstance(form, AnnotatedForm) else form.gradient_placements


def _over_mesh_info(mesh_info, default):
    mesh = mesh_info if isinstance(mesh_info, DeviceMesh) else mesh_info.mesh
    if mesh is default.mesh:
        return default
    dims = getattr(mesh_info, "dp_mesh_dims", None)
    if dims is None:
        return DataParallel(mesh)
    return DataParallel(mesh, not dims.shard_names, mesh_info.spmd_mesh, tuple(dims.shard_names), tuple(dims.replicate_names))
