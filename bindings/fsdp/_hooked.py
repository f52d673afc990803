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
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from ._api import CPUOffloadPolicy

_PRE, _POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"
_RELEASES = "fsdp_should_release_all_gather_outputs_after_post_all_gather"
_ALIGNMENT = 16  # bytes: where each tensor begins among what a rank sends
_stand_ins = WeakTensorKeyDictionary()


def has_hooks(tensor):
    return not isinstance(tensor, DTensor) and type(tensor) is not nn.Parameter and hasattr(tensor, _PRE)


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

    def __init__(self, original, form, module, name, mp_policy, offload_policy):
        self.name = f"{type(module).__name__}.{name}"
        self._module, self._entry, self._mp_policy = module, name, mp_policy
        if form.asked is not None and form.asked.dim not in (0, -original.dim()):
            raise NotImplementedError(f"fully_shard: {self.name} is a {type(original).__name__}, which has {_PRE}; expected "
                                      f"Shard(0), found {form.asked}")
        if not original.is_contiguous():
            raise NotImplementedError(f"fully_shard: {self.name} is a {type(original).__name__}, which has {_PRE}; expected "
                                      f"it to be contiguous, found the strides {original.stride()}")
        over = form.over
        self._mesh = over.mesh if over.mesh.ndim == 1 else over.mesh[over.mesh.mesh_dim_names[-1]]
        self._ranks = 1 if over.replicates_only else self._mesh.size()
        rank = 0 if over.replicates_only else self._mesh.get_local_rank()
        self._size, self._stride = original.size(), _contiguous_strides(original.size())
        self._dtype = mp_policy.param_dtype if mp_policy.param_dtype and original.is_floating_point() else original.dtype
        self._releases_outputs = _releases(original)
        self._offloads = isinstance(offload_policy, CPUOffloadPolicy)
        self.local = self._cut(original, rank, offload_policy)
        self.parameter = None  # the DTensor over it
        self._inputs, self._metadata, self._input_sizes = (), None, []
        self._outputs, self._inner = [], []
        self._unsharded = None
        self._is_held = False

    @torch.no_grad()
    def _cut(self, original, rank, offload_policy):
        """This rank's rows, the first of a tensor with as many rows as any rank has."""
        if self._mesh.device_type != original.device.type and not original.is_meta:
            original = original.to(self._mesh.device_type)
        chunks = list(torch.chunk(original, self._ranks, dim=0))
        self._padded_size = chunks[0].size()
        chunk = chunks[rank] if rank < len(chunks) else None
        padded = original.new_zeros(self._padded_size)
        rows = chunk.size(0) if chunk is not None and chunk.numel() > 0 else 0
        if rows > 0:
            padded.narrow(dim=0, start=0, length=rows).copy_(chunk)
        if self._offloads and not padded.is_meta:
            padded = padded.cpu()
            if offload_policy.pin_memory:
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
        if not hasattr(shard, _PRE):
            raise RuntimeError(f"{self.name}: its shard was a tensor with {_PRE} and is a {type(shard).__name__} now; what has "
                               "replaced it (to_empty, to, load_state_dict) has to keep the class")
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
        return sum(_aligned(each.nbytes) for each in self._inputs)

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
