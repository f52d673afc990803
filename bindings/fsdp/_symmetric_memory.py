"""FSDP2's set_symm_mem_for_comm: torch's own collectives in symmetric memory, as custom collectives of a module's groups."""

import torch
import torch.distributed._symmetric_memory as symm_mem
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as torchs

from ._meshes import process_group_over
from ._states import state_of

# Of torch 2.11 to 2.15 not all have both.
_Gather = getattr(torchs, "SymmMemAllGather", None)
_Reduce = getattr(torchs, "SymmMemReduceScatter", None)


def use_symmetric_memory(core, device_type, backend):
    """As FSDP2: gathers always, reductions where they only sum, which is all that NCCL does in symmetric memory. torch raises
    where it has no such backend, here and not at the first use. A collective call."""
    if _Gather is None or _Reduce is None:
        raise RuntimeError(f"set_symm_mem_for_comm: torch {torch.__version__} has no collectives in symmetric memory for FSDP")
    comms = core.group_comms()
    if not comms:
        return
    sums = any(only_sums for *_, only_sums, _ in comms)
    for _, gather, reduce, _, buffers in comms:
        _check_replaceable(gather, _Gather, "all-gather")
        _check_replaceable(reduce, _Reduce, "reduce-scatter")
        if sums:
            _check_one_buffer(buffers)
    symm_mem.set_backend(backend)
    symm_mem.get_mem_pool(torch.empty(0, device=device_type).device)
    # Each connects its group, and serves all: a call is told its own.
    gathers = [_Gather(process_group_over(ranks), backend) for ranks, *_ in comms]
    core.set_custom_all_gather(gathers[-1], process_group_over)
    if sums:
        core.set_custom_reduce_scatter(_Reduce(process_group_over(comms[-1][0]), backend), process_group_over)


def check_reduce_scatter_buffers(module, buffers, recurse):
    """Raises ValueError where reductions of the module, or with `recurse` below it, are in symmetric memory, which has one
    buffer for them."""
    for each in module.modules() if recurse is True else (module,):
        state = state_of(each)
        has_comms = _Reduce is not None and state is not None and state.core is not None
        comms = state.core.group_comms() if has_comms else []
        if any(isinstance(reduce, _Reduce) for _, _, reduce, _, _ in comms):
            _check_one_buffer(buffers)


def _check_replaceable(comm, kind, what):
    if comm is not None and not isinstance(comm, kind):
        found = comm if isinstance(comm, str) else type(comm).__name__
        raise AssertionError(f"set_symm_mem_for_comm: the module has a custom {what} ({found}), which decides where buffers "
                             f"are; first call set_custom_{what.replace('-', '_')}(None)")


def _check_one_buffer(buffers):
    if buffers > 1:
        raise ValueError(f"set_reduce_scatter_max_input_buffers: expected 1 with reduce-scatters in symmetric memory, found "
                         f"{buffers}")
