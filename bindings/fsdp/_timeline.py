"""A recording of what sharded models do: `timeline` and what it gives."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch.nn as nn

from . import _C, _checks
from ._module import FSDPModule
from ._states import live_states

_recording: set[int] = set()  # roots


@dataclass(frozen=True)
class TimelineEvent:
    """Something that took time on this rank. Times are in ns since the epoch, from one steady clock."""

    kind: Literal["phase", "use", "runtime", "collective"]
    """"phase" of a step ("forward", "backward", "between steps"); "use" of a group by operators; "runtime": work or a
    wait of the library ("FSDP::all_gather_wait (blocks.3)"); "collective", from its launch until it is waited for."""
    name: str
    begin_ns: int
    end_ns: int
    subject: str = ""
    """Of a collective: the module's name."""
    group: str = ""
    """Of a collective: the ranks that took part."""
    ranks: int = 0
    """Of a collective: how many took part."""
    bytes: int = 0
    """Of a collective: of its full buffer, as `statistics` counts them."""
    is_given_up: bool = False
    """Of a collective: nobody waited for it."""


@dataclass(frozen=True)
class TimelineBytes:
    """Bytes that a root holds on this rank, from `time_ns` (ns since the epoch) until the next entry."""

    time_ns: int
    unsharded: int
    """Of parameters that are gathered, or on their way."""
    packed: int
    """Of gradients that a reduction holds."""
    live: int
    """Of both and of this rank's shards. Activations and the optimizer's state are not in it."""


@dataclass
class Timeline:
    """What this rank has done, as its host saw it; filled when the block of `timeline` ends.

    On a GPU that is when work was queued, not when it ran: torch.profiler shows that, with the same names.
    """

    rank: int = 0
    events: list[TimelineEvent] = field(default_factory=list)
    """By begin, of all roots."""
    bytes: list[TimelineBytes] = field(default_factory=list)
    """By time, of each root after the other."""
    dropped: int = 0
    """Events and byte counts that found no room."""
    _roots: list[_C.Timeline] = field(default_factory=list, repr=False)

    def json(self) -> str:
        """The Chrome trace format, which ui.perfetto.dev opens: tracks of the host and of collectives, and counters of
        unsharded, packed and live bytes."""
        return _C.timeline_json(self._roots)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes `json()` to the file `path`."""
        Path(path).write_text(self.json())

    def _take(self, roots):
        self._roots = roots
        self.rank = roots[0].rank() if roots else 0
        self.dropped = sum(each.dropped() for each in roots)
        events = [TimelineEvent(*event) for each in roots for event in each.events()]
        self.events[:] = sorted(events, key=lambda event: event.begin_ns)
        self.bytes[:] = [TimelineBytes(*held) for each in roots for held in each.bytes()]
        return self


def _states_by_root(module):
    """Of each root the states that belong to it."""
    if module is None:
        states = set(live_states)
    else:
        states = {each._get_fsdp_state() for each in module.modules() if isinstance(each, FSDPModule)}
    by_root = {}
    for state in states:
        by_root.setdefault(state.core.root_id(), []).append(state)
    return by_root


@contextlib.contextmanager
def timeline(
    module: nn.Module | None = None, *, path: str | os.PathLike[str] | None = None, max_events: int = 1 << 20
) -> Iterator[Timeline]:
    """Records what `module`, or all that is sharded in this process, does in the block, on this rank:

        with fsdp.timeline(model, path="rank{rank}.json") as seen:
            train_one_step()
        print(fsdp.report(model))  # knows the last timeline of the model

    path: where to write it when the block ends; "{rank}" in it becomes this rank's number. max_events: of each root,
    more are dropped; one takes about 100 bytes. No communication; without a timeline a step costs nothing more.

    Raises ValueError where nothing is sharded, RuntimeError if one of this model is under way.
    """
    max_events = _checks.whole_number(max_events, "timeline: max_events")
    if max_events < 1:
        raise ValueError(f"timeline: max_events: expected 1 or more, found {max_events}")
    by_root = _states_by_root(module)
    if not by_root:
        raise ValueError("timeline: expected a sharded module, found none; call fully_shard first")
    if not _recording.isdisjoint(by_root):
        raise RuntimeError("timeline: a timeline of this model is being recorded already; end that first")
    seen = Timeline()
    _recording.update(by_root)
    try:
        for states in by_root.values():
            states[0].core.start_timeline(max_events)
        yield seen
    finally:
        _recording.difference_update(by_root)
        roots = []
        for states in by_root.values():
            with contextlib.suppress(_C.Error):  # a root that the block has made a part of another one
                of_root = states[0].core.stop_timeline()
                roots.append(of_root)
                for state in live_states:
                    if state.core.root_id() == states[0].core.root_id():
                        state.timeline = Timeline()._take([of_root])
        seen._take(roots)
    if path is not None:
        seen.write(str(path).replace("{rank}", str(seen.rank)))
