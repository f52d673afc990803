"""What a sharded model is and does, for a person: `report`."""

import os
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist
import torch.nn as nn

from . import _report_page
from ._local_shards import outermost_sharded
from ._report_step import StepRecord, last_step
from ._timeline import Timeline


@dataclass(frozen=True)
class GroupReport:
    """One group of parameters that is gathered and reduced together. Bytes are of this rank."""

    name: str
    """"root", or the module's path from it."""
    depth: int
    """Sharded modules around it."""
    parameters: int
    """How many; 0: the module has none of its own."""
    sharded_bytes: int
    """Of this rank's part, with padding."""
    unsharded_bytes: int
    """Of the whole, while it is gathered."""
    layout: str
    """"Shard(0)", "Replicate(), Shard(1)", ..."""
    reshard_after_forward: str
    """"true", "false", a number of ranks, or what None came to: "unset (true)"."""
    frozen_bytes: int
    """Of unsharded parameters that need no gradient."""
    trainable_bytes: int
    """Of unsharded parameters that need one."""
    exempt_parameters: tuple[str, ...] = ()
    """Names of those that MixedPrecisionPolicy.is_exempt keeps in their own dtype."""


@dataclass(frozen=True)
class StepReport:
    """What the last complete step did on this rank: counts and bytes, as `statistics` has them."""

    all_gathers: int
    gathered_bytes: int
    reductions: int
    reduced_bytes: int
    communicated_bytes: int
    peak_bytes: int
    """The most bytes of unsharded parameters at one time."""
    exposed_wait_ms: float
    """Milliseconds that the host waited for collectives: see `FSDPModule.statistics`."""


@dataclass(frozen=True)
class BudgetOutlook:
    """What a step would gather under `set_unsharded_byte_budget(budget_bytes)`."""

    budget_bytes: int
    gathered_bytes: int
    all_gathers: int


@dataclass(frozen=True)
class Report:
    """What `report` returns. `str` of it is a table as text; a notebook shows it as a page."""

    groups: tuple[GroupReport, ...]
    """Depth first, the root first."""
    forward_order: tuple[str, ...]
    """Names of groups in the order in which a forward uses them; empty until a step has shown it."""
    backward_order: tuple[str, ...]
    """The same of backward."""
    rank: int
    """This one."""
    ranks: int
    """Of the root's mesh."""
    backend: str
    """That it communicates over: "gloo", "nccl"."""
    sharded_bytes: int
    """Of this rank's shards."""
    unsharded_bytes: int
    """Of what is gathered now."""
    peak_unsharded_bytes: int
    """The most at one time since fully_shard."""
    last_step: StepReport
    budget_bytes: int | None
    """What `set_unsharded_byte_budget` has set."""
    outlook: tuple[BudgetOutlook, ...]
    """From the least budget that a step can do with to the one that gathers everything once. Empty until a step has shown the
    order, and where a step's forward goes through it more than once before backward: what is planned is for one."""
    step: StepRecord | None
    """When the last step of the model's last timeline gathered, held and waited for what; None without one."""
    text: str = field(repr=False)

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return _report_page.fragment(self)

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Writes one page to the file `path`, which needs no network: the tree of groups and their bytes, residency over
        the recorded step, what was gathered when and what was waited for, and the curve of the byte budget."""
        Path(path).write_text(_report_page.page(self))


def report(module: nn.Module, timeline: Timeline | None = None) -> Report:
    """What the root of `module` is and did in its last step, on this rank. Outside a step. No communication.

    timeline: that `Report.step` is made of, of this model alone; None: the last one that `fsdp.timeline` has recorded.

    Raises ValueError unless `module` is sharded, or holds exactly one outermost sharded module.
    """
    roots = outermost_sharded(module)
    if len(roots) != 1:
        raise ValueError("report: expected a module that is sharded, or holds one outermost sharded module, found "
                         f"{type(module).__name__} with {len(roots)}; call report on each of those")
    state = roots[0]._get_fsdp_state()
    found = state.core.report()
    recorded = timeline if timeline is not None else state.timeline
    mesh = state.mesh
    return Report(
        groups=tuple(GroupReport(**group) for group in found["groups"]),
        forward_order=tuple(found["forward_order"]),
        backward_order=tuple(found["backward_order"]),
        rank=dist.get_rank(),
        ranks=mesh.size(),
        backend=dist.get_backend(mesh.get_group(mesh.ndim - 1)),
        sharded_bytes=found["sharded_bytes"],
        unsharded_bytes=found["unsharded_bytes"],
        peak_unsharded_bytes=found["peak_unsharded_bytes"],
        last_step=StepReport(**found["last_step"]),
        budget_bytes=found["budget_bytes"],
        outlook=tuple(BudgetOutlook(*row) for row in found["outlook"]),
        step=last_step(recorded) if recorded is not None else None,
        text=found["text"],
    )
