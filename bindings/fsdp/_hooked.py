"""Parameters that are tensor subclasses and say themselves how they are gathered, as FSDP2 has it.

`fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy)`, or of `mesh` alone, of the shard gives what this
rank sends, any number of tensors, and what it wants to be told afterwards. `fsdp_post_all_gather(outputs, metadata,
param_dtype, out=None)` makes the tensor that modules compute with the first time, and tells which tensors' memory goes with
a release; later it fills `out`. The core holds a plain tensor of the same sizes and dtype as the parameter: gradients
and their reduction go through that.
"""

import inspect

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.weak import WeakTensorKeyDictionary

from ._api import CPUOffloadPolicy

_PRE, _POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"
_RELEASES = "fsdp_should_release_all_gather_outputs_after_post_all_gather"
_ALIGNMENT = 16  # bytes: where each tensor begins among what a rank sends
_stand_ins = WeakTensorKeyDictionary()


def is_gathered_by_hooks(tensor):
    """A tensor subclass that has the hooks, or that nothing but hooks, which it may get until its first gather, can gather."""
    if isinstance(tensor, DTensor) or type(tensor) in (nn.Parameter, torch.Tensor):
        return False
    return is_traceable_wrapper_subclass(tensor) or hasattr(tensor, _PRE)


def has_late_hooks(parameter):
    """Whether the local tensor of a sharded parameter has got hooks of its own, as an object."""
    local = parameter._local_tensor
    return any(hasattr(local, name) for name in (_PRE, _POST, _RELEASES)) and check(local)


def check(tensor):
    """Whether the tensor has the hooks; AssertionError, as FSDP2's, if it has a part of them."""
    has_pre, has_post = hasattr(tensor, _PRE), hasattr(tensor, _POST)
    if has_pre != has_post:
        raise AssertionError(f"fully_shard: a parameter is a {type(tensor).__name__}, which has {_PRE if has_pre else _POST} "
                             f"but not {_POST if has_pre else _PRE}; define both")
    if not hasattr(tensor, _RELEASES):
        return has_pre
    if not has_pre:
        raise AssertionError(f"fully_shard: a parameter is a {type(tensor).__name__}, which has {_RELEASES} but neither "
                             f"{_PRE} nor {_POST}; define these, too")
    _releases(tensor)
    return True


def _releases(tensor):
    if not hasattr(tensor, _RELEASES):
        return False
    answer = getattr(tensor, _RELEASES)()
    if not isinstance(answer, bool):
        raise AssertionError(f"{type(tensor).__name__}.{_RELEASES}: expected a bool, got {answer!r} "
                             f"({type(answer).__name__})")
    return answer


def check_released(param, reshard_after_forward):
    """After forward, one with the hooks is not kept as shards of fewer ranks."""
    if reshard_after_forward is not None and not isinstance(reshard_after_forward, bool):
        raise NotImplementedError(f"fully_shard: a parameter is a {type(param).__name__}, which has {_PRE}; expected "
                                  f"reshard_after_forward to be True, False or None, found {reshard_after_forward}")


def stand_in(parameter):
    """What the core has for it, the same one every time."""
    made = _stand_ins.get(parameter)
    if made is None:
        made = _stand_ins[parameter] = torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    made.requires_grad_(parameter.requires_grad)
    if getattr(parameter, "_has_grad_dtype_override", False):  # torch 2.15
        made.grad_dtype = parameter.grad_dtype
    return made


class HookedParameter:
    """One parameter's shard, what of it is sent, and what has been made of what was gathered."""

    def __init__(self, place, over, original, policies):
        """place: (module, name in it). over: (mesh, whether it replicates only). original: has the whole's sizes and dtype.
        policies: (mp_policy, offload_policy)."""
        self._module, self._entry = place
        self.name = f"{type(self._module).__name__}.{self._entry}"
        mesh, replicates_only = over
        self._mesh = mesh if mesh.ndim == 1 else mesh[mesh.mesh_dim_names[-1]]
        self._ranks = 1 if replicates_only else self._mesh.size()
        self._rank = 0 if replicates_only else self._mesh.get_local_rank()
        self._size, self._stride = original.size(), _contiguous_strides(original.size())
        self._padded_size = torch.Size((-(-self._size[0] // self._ranks), *self._size[1:])) if self._size else self._size
        self._mp_policy, offload_policy = policies
        self._dtype = None  # that the second hook is asked for
        self._form = None  # what `_unsharded` was made of
        self._offloads = isinstance(offload_policy, CPUOffloadPolicy)
        self._pins = self._offloads and offload_policy.pin_memory
        self.local = None
        self.parameter = None  # the DTensor over it
        self._inputs, self._metadata, self._input_sizes = (), None, []
        self._outputs, self._inner = [], []
        self._unsharded = None
        self._is_held = self._releases_outputs = False

    @classmethod
    def of(cls, original, form, place, policies, values):
        """Of a module's parameter. values: (parameter, mesh, name) -> what its shard is cut from, on the mesh's device or
        meta."""
        over = form.over
        made = cls(place, (over.mesh, over.replicates_only), original, policies)
        if form.asked is not None:
            made._check_dim(original, form.asked)
        if not original.is_contiguous():
            raise NotImplementedError(f"fully_shard: {made.name} is a {type(original).__name__}, which has {_PRE}; expected "
                                      f"it to be contiguous, found the strides {original.stride()}")
        with torch.no_grad():
            made.local = made._cut(values(original, over.mesh, made.name))
        return made

    @classmethod
    def of_shard(cls, parameter, place, state):
        """Of a sharded parameter whose local tensor has got hooks since."""
        *replicate, last = parameter.placements
        made = cls(place, (parameter.device_mesh, isinstance(last, Replicate)), parameter, state.policies)
        if parameter.device_mesh.ndim != state.mesh.ndim or any(not isinstance(each, Replicate) for each in replicate):
            raise NotImplementedError(f"fully_shard: the local tensor of {made.name} has {_PRE}; expected a parameter that is "
                                      f"sharded by fully_shard alone, found the placements {parameter.placements}")
        if not isinstance(last, Replicate):
            made._check_dim(parameter, last)
        made.local, made.parameter = parameter._local_tensor, parameter
        return made

    def _check_dim(self, parameter, shard):
        if type(shard) is not Shard or shard.dim not in (0, -parameter.dim()):
            raise NotImplementedError(f"fully_shard: {self.name} is a {type(parameter).__name__}, which has {_PRE}; expected "
                                      f"Shard(0), found {shard}")

    def _cut(self, original):
        """This rank's rows, the first of a tensor with as many rows as any rank has."""
        chunks = list(torch.chunk(original, self._ranks, dim=0))
        chunk = chunks[self._rank] if self._rank < len(chunks) else None
        padded = original.new_zeros(self._padded_size)
        rows = chunk.size(0) if chunk is not None and chunk.numel() > 0 else 0
        if rows > 0:
            padded.narrow(dim=0, start=0, length=rows).copy_(chunk)
        if self._offloads and not padded.is_meta:
            padded = padded.cpu()
            if self._pins:
                padded = padded.pin_memory()
        return padded.narrow(dim=0, start=0, length=rows)

    def _shard(self):
        """The shard as it is now: a user may have replaced the DTensor (load_state_dict(assign=True))."""
        now = self._module._parameters.get(self._entry)
        if isinstance(now, DTensor):
            self.parameter = now
        local = self.parameter._local_tensor
        return local.to(self._mesh.device_type, non_blocking=True) if self._offloads else local

    @torch.no_grad()
    def prepare(self):
        """Asks the first hook. Returns the bytes that this rank sends."""
        shard = self._shard()
        if not check(shard):
            self._refuse_without_hooks(shard)
        expected = len(inspect.signature(shard.fsdp_pre_all_gather).parameters)
        if expected == 1:
            inputs, self._metadata = shard.fsdp_pre_all_gather(self._mesh)
        elif expected == 5:
            inputs, self._metadata = shard.fsdp_pre_all_gather(self._mesh, self._size, self._stride, self._module,
                                                               self._mp_policy)
            self._check_padded(shard, inputs)
        else:
            raise AssertionError(f"{self.name}: {type(shard).__name__}.{_PRE} takes {expected} arguments; expected mesh, "
                                 "outer_size, outer_stride, module and mp_policy, or mesh alone")
        self._input_sizes = [each.size() for each in inputs]
        self._inputs = [each.reshape(-1) for each in inputs]
        self._follow(shard)
        return sum(_aligned(each.nbytes) for each in self._inputs)

    def _follow(self, shard):
        """A shard that has been converted or moved since makes another one to compute with."""
        is_cast = self._mp_policy.param_dtype and shard.is_floating_point()
        self._dtype = self._mp_policy.param_dtype if is_cast else shard.dtype
        form = (self._dtype, shard.device, [(each.numel(), each.dtype) for each in self._inputs])
        if form != self._form:
            self._form, self._unsharded = form, None
            self._outputs, self._inner = [], []

    def _refuse_without_hooks(self, shard):
        if type(self.local) is type(shard) and is_traceable_wrapper_subclass(shard):
            raise NotImplementedError(f"{self.name} is a {type(shard).__name__}, a tensor subclass that fsdp cannot gather; "
                                      f"give the class, or its shard, {_PRE} and {_POST} before its first forward, or ignore it "
                                      "with ignored_params")
        raise RuntimeError(f"{self.name}: its shard was a tensor with {_PRE} and is a {type(shard).__name__} without it now; "
                           "what has replaced it (to_empty, to, load_state_dict) has to keep the class, and hooks of the "
                           "object are to be put on it again")

    def _check_padded(self, shard, inputs):
        if shard.size() == self._padded_size or all(each.size() == self._padded_size for each in inputs):
            return
        raise AssertionError(f"{self.name}: {tuple(self._size)} is not even over {self._ranks} ranks, so that {_PRE} has to "
                             f"give tensors of the padded size {tuple(self._padded_size)}, but it gave "
                             f"{[tuple(each.size()) for each in inputs]}")

    @torch.no_grad()
    def write(self, encoded):
        """What is sent, as bytes. The inputs stay until it has been gathered: another stream may be reading them."""
        begin = 0
        for each in self._inputs:
            encoded[begin:begin + each.nbytes].copy_(each.view(torch.uint8), non_blocking=True)
            gap = _aligned(each.nbytes) - each.nbytes
            if gap:
                encoded[begin + each.nbytes:begin + each.nbytes + gap].zero_()
            begin += each.nbytes + gap

    @torch.no_grad()
    def read(self, encoded):
        """encoded: (ranks, bytes)."""
        self._allocate_outputs(encoded.device)
        begin = 0
        for each, output in zip(self._inputs, self._outputs):
            output.view(torch.uint8).view(self._ranks, -1).copy_(encoded[:, begin:begin + each.nbytes])
            begin += _aligned(each.nbytes)

    def _allocate_outputs(self, device):
        if self._outputs:
            for output in self._outputs:
                _allocate(output)
        else:
            self._outputs = [torch.empty(each.numel() * self._ranks, dtype=each.dtype, device=device)
                             for each in self._inputs]

    @torch.no_grad()
    def finish(self):
        """Asks the second hook."""
        outputs = tuple(output.view(-1, *size[1:]) for output, size in zip(self._outputs, self._input_sizes))
        local, metadata = self.parameter._local_tensor, self._metadata
        self._inputs, self._metadata = (), None
        if self._unsharded is None:
            self._releases_outputs = _releases(local)
            made, self._inner = local.fsdp_post_all_gather(outputs, metadata, self._dtype)
            made = torch.as_strided(made, self._size, self._stride, storage_offset=0)
            self._unsharded = nn.Parameter(made, requires_grad=self.parameter.requires_grad)
        else:
            for each in self._inner:
                _allocate(each)
            local.fsdp_post_all_gather(outputs, metadata, self._dtype, out=self._unsharded)
        self._is_held = True
        if self._releases_outputs:
            for output in self._outputs:
                _free(output)

    def release(self):
        self._is_held = False
        for each in (*self._outputs, *self._inner):
            _free(each)

    @torch.no_grad()
    def shown(self):
        """What modules compute with; None before the first gather."""
        if self._ranks == 1 and not self._is_held:
            self.prepare()
            self._allocate_outputs(self._inputs[0].device)
            for each, output in zip(self._inputs, self._outputs):
                output.copy_(each)
            self.finish()
        return self._unsharded

    def rest(self):
        """Modules show the shard."""
        if self._ranks == 1:
            self.release()


def _aligned(count):
    return -(-count // _ALIGNMENT) * _ALIGNMENT


def _contiguous_strides(size):
    strides, step = [], 1
    for length in reversed(size):
        strides.insert(0, step)
        step *= max(length, 1)
    return tuple(strides)


def _allocate(tensor):
    storage, count = tensor.untyped_storage(), tensor.numel() * tensor.itemsize
    if storage.size() != count:
        storage.resize_(count)


def _free(tensor):
    storage = tensor.untyped_storage()
    if storage.size() != 0:
        storage.resize_(0)
