"""What a sharded module is and can do: FSDPModule's controls and the handles that they return."""

import contextlib
import math
from typing import Any, Callable, Literal, overload

import torch
import torch.nn as nn
from typing_extensions import deprecated

from . import _C, _api, _checks, _torch_names
from ._checks import flag
from ._meshes import process_group_over
from ._states import state_of
from ._symmetric_memory import check_reduce_scatter_buffers, use_symmetric_memory


@contextlib.contextmanager
def _refused_as_assertion():
    """What the core refuses as a wrong call is an AssertionError in FSDP2: memory for a custom collective."""
    try:
        yield
    except ValueError as error:
        raise AssertionError(str(error)) from None


ReduceScatterStart = Literal["by_size", "first_after_all_gather", "first_after_next_backward"]


class UnshardHandle(_torch_names.UnshardHandle):
    """What `FSDPModule.unshard(async_op=True)` returns. One that a program makes itself waits for nothing."""

    _core: _C.ShardedModule | None = None

    def wait(self) -> None:
        """Returns when the parameters are gathered (on a GPU: when the current stream may use them) and registered on
        the module. Waiting twice is free.
        """
        if self._core is not None:
            self._core.unshard_done()
            self._core = None


class GradientReductionHandle(_api.GradientReductionHandle):
    """What `FSDPModule.finalize_backward(async_op=True)` returns. One that a program makes itself waits for nothing."""

    _core: _C.GradientReduction | None = None

    def wait(self) -> None:
        """Returns when the gradients of this root are reduced (on a GPU: when the current stream may use them).

        Waiting twice is free. Raises RuntimeError if `reset_iter_state` has dropped the reduction.
        """
        if self._core is not None:
            self._core.wait()
            self._core = None


class FSDPModule(_torch_names.FSDPModule):
    """The class that `fully_shard` puts in front of a module's own, with the controls of the sharded module.

    `isinstance(module, torch.distributed.fsdp.FSDPModule)` holds for it, too. It is not made by itself.

    A control takes effect on what comes after it and communicates nothing, where it does not say "a collective call":
    then all ranks of the mesh call it, in the same order. With `recurse` it is for the sharded modules below, too.
    A wrong type raises TypeError, a value that is not possible ValueError, and a control of the root on another module,
    or at a time when it cannot be, RuntimeError; nothing has changed then.
    """

    def __new__(cls, *args, **kwargs):
        # The module's own class: what indexing a container, say, makes a new one of.
        own = next(base for base in cls.__mro__[1:] if not issubclass(base, _torch_names.FSDPModule))
        if own is object:
            raise TypeError(f"{cls.__name__} cannot be constructed; call fully_shard on a module, which adds this class to it")
        module = own.__new__(own)
        module.__init__(*args, **kwargs)
        return module

    def _core(self):
        state = state_of(self)
        if state is None:
            raise AssertionError(f"No FSDP state found on {self}")
        return state.core

    def _get_fsdp_state(self):
        return state_of(self)

    def _pass_on(self, control, value, recurse):
        """To this module's core, and, with `recurse`, to those of modules below that replicate was applied to, where this is
        one of fully_shard, or the other way round: each passes it on to those of its own kind."""
        recurse = flag(recurse, "recurse")
        others = _cores_of_other_kinds(self, state_of(self).kind, set()) if recurse else ()
        for core in [self._core(), *others]:
            getattr(core, control)(value, recurse)

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gathers this module's own parameters, not those of sharded modules below it, and registers them.

        They are in `param_dtype` where the policy names one. With `async_op` it returns at once, and the handle's
        `wait`, or the module's forward, waits. A collective call.
        """
        async_op = flag(async_op, "unshard")
        core = self._core()
        core.unshard()
        if async_op:
            handle = UnshardHandle()
            handle._core = core
            return handle
        core.unshard_done()
        return None

    def reshard(self) -> None:
        """Releases this module's unsharded parameters and registers the sharded ones, which are DTensors."""
        self._core().reshard()

    def reset_iter_state(self) -> None:
        """On the root, after an exception in forward or backward: drops the iteration and its gradients, also those
        that were to be added up. Handles of `finalize_backward` raise RuntimeError from then on.
        """
        self._core().reset_iter_state()

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """False: more backwards follow, so the end of a backward waits for no reduction."""
        self._core().set_is_last_backward(flag(is_last_backward, "set_is_last_backward"))

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """On the root. True: `finalize_backward` ends the step, not the end of a backward.

        Raises RuntimeError between a backward and its finalization.
        """
        self._core().set_manual_backward_finalization(flag(enabled, "set_manual_backward_finalization"))

    @overload
    def finalize_backward(self, *, async_op: Literal[False] = False) -> None: ...

    @overload
    def finalize_backward(self, *, async_op: Literal[True]) -> GradientReductionHandle: ...

    @overload
    def finalize_backward(self, *, async_op: bool) -> GradientReductionHandle | None: ...

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """On the root: reduces what the backwards have left, and waits, or, with `async_op`, leaves that to the handle,
        which is to be waited on before the next forward. A collective call.

        Raises RuntimeError without `set_manual_backward_finalization(True)`, and inside a backward.
        """
        if flag(async_op, "finalize_backward"):
            handle = GradientReductionHandle()
            handle._core = self._core().finalize_backward_async()
            return handle
        self._core().finalize_backward()
        return None

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """False: backward leaves gradients unsharded on this rank, to be reduced by a later one.

        True turns the all-reduce of HSDP on again, too.
        """
        value = flag(requires_gradient_sync, "set_requires_gradient_sync")
        self._pass_on("set_requires_gradient_sync", value, recurse)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """HSDP. False: backward reduces within the shard group only, and the sums wait for a later one."""
        value = flag(requires_all_reduce, "set_requires_all_reduce")
        self._pass_on("set_requires_all_reduce", value, recurse)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether parameters are released after forward; an int as for `fully_shard`."""
        _checks.reshard_after_forward(reshard_after_forward, "set_reshard_after_forward: the value")
        self._core().set_reshard_after_forward(reshard_after_forward, flag(recurse, "recurse"))
        modules = self.modules()  # type: ignore[attr-defined]  # an nn.Module is behind this class
        for module in modules if recurse else [self]:
            state = state_of(module)
            if state is not None and state.kind is state_of(self).kind:
                state.follow_reshard_after_forward(reshard_after_forward)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """False: parameters stay unsharded after backward."""
        value = flag(reshard_after_backward, "set_reshard_after_backward")
        self._pass_on("set_reshard_after_backward", value, recurse)

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """True: released parameters keep their memory, at the same addresses."""
        self._pass_on("set_keep_unsharded_storage", flag(keep, "set_keep_unsharded_storage"), recurse)

    def set_modules_to_forward_prefetch(  # type: ignore[override]
        self, modules: list["FSDPModule"]
    ) -> None:
        """Gathers these when this module's forward begins, instead of along the learned order. [] goes back to that.

        Raises ValueError for a module that is not sharded.
        """
        self._core().set_modules_to_forward_prefetch(_cores_of(modules))

    def set_modules_to_backward_prefetch(  # type: ignore[override]
        self, modules: list["FSDPModule"]
    ) -> None:
        """Gathers these when this module's backward begins, instead of along the learned order. [] goes back to that.

        Raises ValueError for a module that is not sharded.
        """
        self._core().set_modules_to_backward_prefetch(_cores_of(modules))

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divides the sums of this module's own gradients over all ranks by this, above 0, instead of by the number of
        ranks."""
        self._core().set_gradient_divide_factor(_checks.number(factor, "set_gradient_divide_factor"))

    @deprecated("Use `set_gradient_divide_factor` instead")
    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The older name of `set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """True: this module's own collectives only add up; what has to be divided is divided outside them."""
        self._core().set_force_sum_reduction_for_comms(flag(enable, "set_force_sum_reduction_for_comms"))

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """False: backward does not gather this module's parameters ahead of their use."""
        self._core().set_unshard_in_backward(flag(unshard_in_backward, "set_unshard_in_backward"))

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """True: parameters without a gradient take part in every reduction with zeros."""
        value = flag(reduce_scatter_unused_params, "set_reduce_scatter_unused_params")
        self._pass_on("set_reduce_scatter_unused_params", value, recurse)

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """How many groups' packed gradients may be alive in reduce-scatters under way, 1 or more (1)."""
        buffers = _checks.whole_number(max_input_buffers, "set_reduce_scatter_max_input_buffers")
        check_reduce_scatter_buffers(self, buffers, recurse)
        self._pass_on("set_reduce_scatter_max_input_buffers", buffers, recurse)

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """True: reduce-scatters have a communicator of their own. A collective call the first time.

        The next parameters are then gathered before gradients are packed, and both take memory until that is over.
        """
        value = flag(enable, "set_separate_reduce_scatter_group")
        self._core().set_separate_reduce_scatter_group(value, flag(recurse, "recurse"))

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """True: buffers of collectives come from the process group's allocator, where it has one."""
        value = flag(enable, "set_allocate_memory_from_process_group_for_comm")
        with _refused_as_assertion():
            self._core().set_allocate_memory_from_process_group_for_comm(value)

    def set_symm_mem_for_comm(self, backend: Literal["NCCL"] = "NCCL") -> None:
        """Gathers this module's groups in torch's symmetric memory, and reduces them there where
        `set_force_sum_reduction_for_comms(True)` came before. A collective call; on GPUs with NCCL.

        Raises AssertionError with a custom collective or memory from the process group, RuntimeError where torch has no
        such backend, and ValueError if reduce-scatters then had more than one input buffer.
        """
        backend = _checks.text(backend, "set_symm_mem_for_comm")
        use_symmetric_memory(self._core(), state_of(self).mesh.device_type, backend)

    def set_custom_all_gather(self, comm: Any) -> None:
        """Gathers this module's group through `comm`, of FSDP2's interface AllGather: `allocate(size, dtype=,
        device=)` and `comm(output_tensor=, input_tensor=, group=, async_op=)`, which may return a dist.Work.

        Buffers are 1-D bytes; the input is this rank's part of the output. None: the library's own again.
        """
        self._set_custom("set_custom_all_gather", comm)

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Reduces this module's gradients through `comm`, of FSDP2's interface ReduceScatter: as for
        `set_custom_all_gather`, with `op=`. Buffers are 1-D in the reduce dtype. None: the library's own again.
        """
        self._set_custom("set_custom_reduce_scatter", comm)

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None] | None, *,
                            stream: torch.Stream | None = None) -> None:
        """Calls `hook` with this module's reduced gradients, 1-D in the reduce dtype, for it to change in place:
        behind the all-reduce of HSDP, or behind the reduce-scatter. stream: to run it in, without HSDP only.
        """
        core = self._core_of_one_group("set_all_reduce_hook")
        if stream is not None and core.replicates():
            raise ValueError("set_all_reduce_hook: a stream cannot be given with HSDP, whose all-reduce has its own")
        core.set_all_reduce_hook(hook if stream is None or hook is None else _in_stream(hook, stream))

    def set_post_optim_event(self, event: torch.Event | None) -> None:
        """On the root: the next forward's gathers wait for this event, recorded behind the optimizer's step, which is
        then forgotten. None, which `record_event` returns on a device without streams: they wait for nothing."""
        self._core().set_post_optim_event(event)

    def _set_custom(self, control, comm):
        getattr(self._core_of_one_group(control), control)(_checks.comm(comm, control), process_group_over)

    def _core_of_one_group(self, control):
        core = self._core()
        if core.group_count() > 1:
            raise ValueError(f"{control}: the module has {core.group_count()} groups, over different meshes "
                             "(shard_placement_fn), but one comm or hook serves one mesh only")
        return core

    def set_prefetch_distance(self, groups: int) -> None:
        """On the root: all-gathers run up to this many groups ahead of compute, in the learned order; 0: none, default 1.
        FSDP2 has no such setting.

        With 2 or more, all-gathers for backward start before forward ends; capture forward and backward in one CUDA graph.
        """
        self._core().set_prefetch_distance(_checks.whole_number(groups, "set_prefetch_distance"))

    def set_unsharded_byte_budget(self, bytes: int | None) -> None:
        """On the root: the bytes that unsharded parameters may take; None: no limit. FSDP2 has no such setting.

        From the second step on, groups whose `reshard_after_forward` is unset stay so that a step gathers the fewest bytes; a
        larger limit never gathers more. It holds in every step, evaluation and read, and goes before prefetch lists; without
        a known order, before `reshard_after_forward=False`. Parameters that one operator reads together, a hook's reads beside
        its operator and `unshard()` go before it.

        Raises ValueError for less than the largest group. The next forward raises RuntimeError, before it begins and on all
        ranks, where the groups that stay by their options leave too little for the others.
        """
        if bytes is not None:
            bytes = _checks.byte_count(bytes, "set_unsharded_byte_budget")
        self._core().set_unsharded_byte_budget(bytes)

    def set_reduce_scatter_start(self, start: ReduceScatterStart) -> None:
        """On the root: when reduce-scatters start, relative to the all-gathers of the same backward. Only for reduce-scatters
        with a communicator of their own. FSDP2 has no such setting.

        Needs one reduce-scatter buffer more than the prefetch distance (`set_reduce_scatter_max_input_buffers`).

        "by_size": at once; or, where that is larger than all that is computed before its parameters are used, then.
        "first_after_all_gather": the first of a backward when those parameters are used, the others at once.
        "first_after_next_backward": the first when the backward of the next group is over, the others at once.
        """
        self._core().set_reduce_scatter_start(_checks.text(start, "set_reduce_scatter_start"))

    def choose_reduce_scatter_start(self, time_step: Callable[[], float], rounds: int = 3) -> ReduceScatterStart:
        """On the root: times each start `rounds` times, in turns; sets and returns the one whose median is lowest on its
        slowest rank. A collective call. On one rank no step runs. FSDP2 has no such function.

        time_step: runs one step, forward and backward at least, and returns how long it took, in any unit; on a GPU
        until that is done. It is called 2 + 3 * rounds times; the steps train as any others. What it raises, on all
        ranks alike, is passed on, and the start is what it was.

        Raises RuntimeError in a step, and if no reductions have a communicator of their own.
        """
        name = "choose_reduce_scatter_start"
        if not callable(time_step):
            raise TypeError(f"{name}: expected a function that runs a step and returns its time, found {time_step!r}")
        rounds = _checks.whole_number(rounds, name)
        wrong = []

        def time():
            # Other ranks run the same steps: what is wrong on this one is told when all of them are over.
            found = time_step()
            try:
                return _checks.number(found, name)
            except (TypeError, ValueError) as error:
                wrong.append(error)
                return math.nan

        try:
            return self._core().choose_reduce_scatter_start(time, rounds)
        except ValueError:
            if wrong:
                raise wrong[0] from None
            raise

    def is_root(self) -> bool:
        """Whether no sharded module is around it."""
        return self._core().is_root()

    def sharded_modules(self) -> list["FSDPModule"]:
        """This module and every sharded module below it that has the same root, in depth-first order, each module once."""
        own = self._core().root_id()
        below = self.modules()  # type: ignore[attr-defined]
        return [module for module in below if isinstance(module, FSDPModule) and module._core().root_id() == own]

    def report(self) -> str:
        """The tree of groups with their bytes, the learned order and what the last step did, as a table in text;
        `fsdp.report` gives it as an object and a page. FSDP2 has no such function."""
        return self._core().report()["text"]

    def statistics(self) -> dict[str, float]:
        """Collectives and bytes of this module's root since it was sharded, and `exposed_wait_ms`, for W&B or
        TensorBoard. FSDP2 has no such function.

        exposed_wait_ms: of the last step (since the last forward began), how long the host waited for collectives.
        Over gloo that is what compute waited. Over NCCL streams wait, and the host does not: a profiler shows theirs.
        Bytes are of whole buffers, `communicated_bytes` what this rank has to send, and to receive.
        """
        return self._core().statistics()

    def _set_unshard_async_op(self, async_op: bool) -> None:
        # Which stream FSDP2's all-gathers take; ours have one of their own.
        return

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # to(), to_empty(), float()...: on the sharded parameters.
        core = self._core()
        core.before_apply()
        behind: Any = super(_torch_names.FSDPModule, self)
        state = state_of(self)
        parameters = list(nn.Module.parameters(self, recurse))  # type: ignore[arg-type]
        attributes = [dict(vars(parameter)) for parameter in parameters]
        state.cast_buffers_back()
        try:
            applied = behind._apply(fn, recurse=recurse)
            core.applied(fn, parameters)
        except BaseException:
            core.apply_failed()
            raise
        finally:
            state.recast_buffers()
            # They went with the tensors that were behind the parameters before.
            for parameter, before in zip(parameters, attributes):
                vars(parameter).update({name: value for name, value in before.items() if name not in vars(parameter)})
        return applied


def _cores_of_other_kinds(module, kind, seen):
    for child in module.children():
        if child in seen:
            continue
        seen.add(child)
        state = state_of(child)
        if state is not None and state.kind is not kind:
            yield state.core
        yield from _cores_of_other_kinds(child, state.kind if state is not None else kind, seen)


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


for _name in vars(_torch_names.FSDPModule):
    if not _name.startswith("__") and callable(getattr(_torch_names.FSDPModule, _name)):
        if _name not in vars(FSDPModule):
            setattr(FSDPModule, _name, _refuse(_name))


def roots(module: nn.Module) -> list[FSDPModule]:
    """The sharded modules at or below `module` that no other one contains, of one call of fully_shard the first. `module`
    itself need not be sharded."""
    found, cores = [], set()

    def visit(below):
        if not isinstance(below, FSDPModule):
            for child in below.children():
                visit(child)
        elif below._core() not in cores:
            cores.add(below._core())
            found.append(below)

    visit(module)
    return found


def _cores_of(modules):
    return [module._core() for module in _checks.fsdp_modules(modules, FSDPModule)]
