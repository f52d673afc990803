"""Whole parameters in the place of the shards, for code that knows nothing of sharding."""

from types import TracebackType

import torch.nn as nn

from . import _C, _checks


class FullParameters:
    """In a `with` block the module is as it was before `fully_shard` (FSDP1's summon_full_params): its attributes, its
    `parameters()` and its `state_dict()` are ordinary tensors, each a whole parameter in its original dtype, that any code
    reads and writes. At its end, also by an exception, the DTensors are back, the same as before, with the elements that
    this rank owns taken from the whole ones.

        with fsdp.FullParameters(model), torch.no_grad():
            model.head.weight[3] = 0

    recurse: False: not the parameters of sharded modules below `module`. writeback: False: what was written is dropped.
    rank0_only: only the first rank of the mesh shows them; the others, which take part in the gather, go on with DTensors;
    needs writeback=False. offload_to_cpu: they are on the CPU, so that the accelerator holds one at a time. with_grads: full
    gradients too, in `.grad`, read and written like the parameters.

    All ranks open it together and write the same values: each rank's writes count for the elements it owns, and replicas
    each keep their own. The end communicates nothing. A forward without autograd may run in it, and computes with the full
    values in their original dtype. A parameter that is put in another's place counts as a write. A tensor-parallel parameter
    is the DTensor that it was before. Peak memory: the parameters shown, and one more.

    Raises RuntimeError inside a step of the module's root (a forward whose backward has not run is one), inside another
    block that shows one of its parameters, on the meta device, and inside it for what would begin a step or move the module;
    ValueError for rank0_only with writeback, gradients that only some ranks have, a parameter with fsdp_pre_all_gather, and
    at the end for a parameter that another of other sizes stands for. Nothing is changed then.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> None:
        if not isinstance(module, nn.Module):
            raise TypeError(f"FullParameters: expected an nn.Module, found {module!r} ({type(module).__name__})")
        asked = {"recurse": recurse, "writeback": writeback, "rank0_only": rank0_only, "offload_to_cpu": offload_to_cpu,
                 "with_grads": with_grads}
        self._arguments = (module, *(_checks.flag(value, name) for name, value in asked.items()))
        self._scope: _C.FullScope | None = None

    def __enter__(self) -> "FullParameters":
        if self._scope is not None:
            raise _C.Error("FullParameters: this block is open already; make another FullParameters for one inside it")
        self._scope = _C.full_parameters(*self._arguments)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, traceback: TracebackType | None
    ) -> None:
        scope, self._scope = self._scope, None
        if scope is not None:
            scope.end()
