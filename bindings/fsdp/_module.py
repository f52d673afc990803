"""What a sharded module is and can do: FSDPModule's controls and the handles that they return."""

from typing import Any, Callable, Literal

import torch
import torch.distributed.fsdp
from typing_extensions import deprecated

from ._meshes import process_group_over


def check_reshard_after_forward(value, subject):
    """An int that does not divide the shard size is the core's to refuse."""
    if not isinstance(value, (bool, int)):
        raise ValueError(f"{subject} should be a bool or an int representing the group size to reshard to, not {value}")


class UnshardHandle(torch.distributed.fsdp.UnshardHandle):
    """What `FSDPModule.unshard(async_op=True)` returns."""

    def __init__(self, core=None):
        self._core = core

    def wait(self) -> None:
        """Waits until the parameters are there, and registers them. Waiting twice is free."""
        if self._core is not None:
            self._core.unshard_done()
            self._core = None


class GradientReductionHandle(getattr(torch.distributed.fsdp, "GradientReductionHandle", object)):
    """What `FSDPModule.finalize_backward(async_op=True)` returns."""

    def __init__(self, core=None):
        self._core = core

    def wait(self) -> None:
        """Waits until all gradients are there; waiting twice is free.

        RuntimeError if `reset_iter_state` has dropped the reduction.
        """
        if self._core is not None:
            self._core.wait()


class FSDPModule(torch.distributed.fsdp.FSDPModule):
    """The class that `fully_shard` puts in front of a module's own, with the controls of the sharded module.

    `isinstance(module, torch.distributed.fsdp.FSDPModule)` holds for it, too.
    """

    def __new__(cls, *args, **kwargs):
        # The module's own class: what indexing a container, say, makes a new one of.
        own = next(base for base in cls.__mro__[1:] if not issubclass(base, torch.distributed.fsdp.FSDPModule))
        module = own.__new__(own)
        module.__init__(*args, **kwargs)
        return module

    def _core(self):
        from ._fully_shard import fully_shard

        state = fully_shard.state(self)
        if state is None:
            raise AssertionError(f"No FSDP state found on {self}")
        return state.core

    def _get_fsdp_state(self):
        from ._fully_shard import fully_shard

        return fully_shard.state(self)

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gathers this module's own parameters, not those of sharded modules below it, and registers them.

        With `async_op` it returns at once, and the handle's `wait`, or the module's forward, waits.
        A collective call.
        """
        core = self._core()
        core.unshard()
        if async_op:
            return UnshardHandle(core)
        core.unshard_done()
        return None

    def reshard(self) -> None:
        """Releases this module's unsharded parameters and registers the sharded ones."""
        self._core().reshard()

    def reset_iter_state(self) -> None:
        """On the root, after an exception in forward or backward: drops the iteration and its gradients."""
        self._core().reset_iter_state()

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """False: more backwards follow, so the end of a backward waits for no reduction."""
        self._core().set_is_last_backward(is_last_backward)

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """On the root. True: `finalize_backward` ends the step, not the end of a backward."""
        self._core().set_manual_backward_finalization(enabled)

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Reduces what the backwards have left, and waits, or, with `async_op`, leaves that to the handle."""
        if async_op:
            return GradientReductionHandle(self._core().finalize_backward_async())
        self._core().finalize_backward()
        return None

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """False: backward leaves gradients unsharded on this rank, to be reduced by a later one.

        True turns the all-reduce of HSDP on again, too.
        """
        self._core().set_requires_gradient_sync(requires_gradient_sync, recurse)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """HSDP. False: backward reduces within the shard group only."""
        self._core().set_requires_all_reduce(requires_all_reduce, recurse)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether parameters are released after forward; an int as for `fully_shard`."""
        check_reshard_after_forward(reshard_after_forward, "set_reshard_after_forward: the value")
        self._core().set_reshard_after_forward(reshard_after_forward, recurse)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """False: parameters stay unsharded after backward."""
        self._core().set_reshard_after_backward(reshard_after_backward, recurse)

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """True: released parameters keep their memory, at the same addresses."""
        self._core().set_keep_unsharded_storage(keep, recurse)

    def set_modules_to_forward_prefetch(self, modules: list["FSDPModule"]) -> None:
        """Gathers these when this module's forward begins, instead of along the learned order."""
        self._core().set_modules_to_forward_prefetch(_cores_of(modules))

    def set_modules_to_backward_prefetch(self, modules: list["FSDPModule"]) -> None:
        """Gathers these when this module's backward begins, instead of along the learned order."""
        self._core().set_modules_to_backward_prefetch(_cores_of(modules))

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divides this module's own gradients by this instead of by the data-parallel size."""
        self._core().set_gradient_divide_factor(factor)

    @deprecated("Use `set_gradient_divide_factor` instead")
    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The older name of `set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """True: this module's own collectives only add up; what has to be divided is divided outside them."""
        self._core().set_force_sum_reduction_for_comms(enable)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """False: backward does not gather this module's parameters ahead of their use."""
        self._core().set_unshard_in_backward(unshard_in_backward)

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """True: parameters without a gradient take part in every reduction with zeros."""
        self._core().set_reduce_scatter_unused_params(reduce_scatter_unused_params, recurse)

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """How many groups' packed gradients may be alive in reduce-scatters under way."""
        self._core().set_reduce_scatter_max_input_buffers(max_input_buffers, recurse)

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """True: reduce-scatters have a communicator of their own. A collective call the first time."""
        self._core().set_separate_reduce_scatter_group(enable, recurse)

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """True: buffers of collectives come from the process group's allocator, where it has one."""
        self._core().set_allocate_memory_from_process_group_for_comm(enable)

    def set_symm_mem_for_comm(self, backend: Literal["NCCL"] = "NCCL") -> None:
        """Symmetric memory for collectives: refused, as no backend of this version has it."""
        self._core().set_symm_mem_for_comm(backend)

    def set_custom_all_gather(self, comm: Any) -> None:
        """Gathers this module's group through `comm`, of FSDP2's interface AllGather: `allocate(size, dtype=,
        device=)` and `comm(output_tensor=, input_tensor=, group=, async_op=)`, which may return a dist.Work.

        Buffers are 1-D bytes; the input is this rank's part of the output. None: the library's own again.
        """
        self._core_of_one_group("set_custom_all_gather").set_custom_all_gather(comm, process_group_over)

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Reduces this module's gradients through `comm`, of FSDP2's interface ReduceScatter: as for
        `set_custom_all_gather`, with `op=`. Buffers are 1-D in the reduce dtype. None: the library's own again.
        """
        self._core_of_one_group("set_custom_reduce_scatter").set_custom_reduce_scatter(comm, process_group_over)

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None] | None, *,
                            stream: torch.Stream | None = None) -> None:
        """Calls `hook` with this module's reduced gradients, 1-D in the reduce dtype, for it to change in place:
        behind the all-reduce of HSDP, or behind the reduce-scatter. stream: to run it in, without HSDP only.
        """
        core = self._core_of_one_group("set_all_reduce_hook")
        if stream is not None and core.replicates():
            raise ValueError("set_all_reduce_hook: a stream cannot be given with HSDP, whose all-reduce has its own")
        core.set_all_reduce_hook(hook if stream is None or hook is None else _in_stream(hook, stream))

    def set_post_optim_event(self, event: torch.Event) -> None:
        """On the root: the next forward's gathers wait for this event, recorded behind the optimizer's step, which is
        then forgotten."""
        self._core().set_post_optim_event(event)

    def _core_of_one_group(self, control):
        core = self._core()
        if core.group_count() > 1:
            raise ValueError(f"{control}: the module has {core.group_count()} groups, over different meshes "
                             "(shard_placement_fn); one comm or hook would serve them all")
        return core

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Nothing to do: gathers never block the host before their use."""

    def set_prefetch_distance(self, groups: int) -> None:
        """On the root: how many groups ahead the learned order is gathered (1); 0: none. Ours alone."""
        self._core().set_prefetch_distance(groups)

    def set_unsharded_byte_budget(self, bytes: int | None) -> None:
        """On the root: the memory that unsharded parameters may take. Ours alone."""
        self._core().set_unsharded_byte_budget(bytes)

    def report(self) -> str:
        """The tree of groups with their bytes, the learned order and what the last step did. Ours alone."""
        return self._core().report()

    def statistics(self) -> dict[str, int]:
        """Collectives and bytes of this module's root since it was sharded. Ours alone."""
        return self._core().statistics()

    def _set_unshard_async_op(self, async_op: bool) -> None:
        # Which stream FSDP2's all-gathers take; ours have one of their own.
        return

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # to(), to_empty(), float()...: on the sharded parameters.
        core = self._core()
        core.reshard()
        applied = super(torch.distributed.fsdp.FSDPModule, self)._apply(fn, recurse=recurse)
        core.applied()
        return applied


def _in_stream(hook, stream):
    def hooked(gradients):
        current = torch.accelerator.current_stream()
        stream.wait_stream(current)
        with stream:
            hook(gradients)
        current.wait_stream(stream)

    return hooked


# What torch's class has and this one does not must not be taken from there: it knows another state.
def _refuse(name):
    def refused(self, *args, **kwargs):
        raise NotImplementedError(f"FSDPModule.{name} is not in this version of fsdp yet")

    refused.__name__ = name
    refused.__doc__ = "Not in this version yet: raises NotImplementedError."
    return refused


for _name in vars(torch.distributed.fsdp.FSDPModule):
    if not _name.startswith("__") and callable(getattr(torch.distributed.fsdp.FSDPModule, _name)):
        if _name not in vars(FSDPModule):
            setattr(FSDPModule, _name, _refuse(_name))


def _cores_of(modules):
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"Expects FSDPModule but got {type(module)}: {module}")
    return [module._core() for module in modules]
