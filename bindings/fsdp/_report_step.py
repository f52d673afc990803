"""One step of a timeline: which group was there when, what was communicated, and what was waited for."""

import bisect
from dataclasses import dataclass


@dataclass(frozen=True)
class Residency:
    """A group's unsharded parameters take memory, from `begin_ms` to `end_ms` of the step."""

    group: str
    begin_ms: float
    end_ms: float


@dataclass(frozen=True)
class Collective:
    """From its launch until the host has waited for it, in ms from the step's begin."""

    operation: str
    """"all_gather", "reduce_scatter" or "all_reduce"."""
    group: str
    begin_ms: float
    end_ms: float
    bytes: int
    """Of the full buffer."""


@dataclass(frozen=True)
class Wait:
    """The host waited for a collective of `group`, in ms from the step's begin."""

    operation: str
    group: str
    begin_ms: float
    end_ms: float


@dataclass(frozen=True)
class HeldBytes:
    """Bytes that are held from `begin_ms` of the step until the next entry: see `TimelineBytes`."""

    begin_ms: float
    unsharded: int
    packed: int
    live: int


@dataclass(frozen=True)
class StepRecord:
    """The last recorded step, of a forward and the backward behind it, on this rank. Times are ms from its begin."""

    duration_ms: float
    backward_begin_ms: float
    """When its backward began; `duration_ms` if there is none."""
    residency: tuple[Residency, ...]
    """By begin. What is there at the end of the record ends with it."""
    collectives: tuple[Collective, ...]
    """In launch order."""
    waits: tuple[Wait, ...]
    """By begin."""
    bytes: tuple[HeldBytes, ...]
    """By begin, the first at 0."""


def _span(timeline):
    """(begin, begin of backward, end) of the last step, in ns; None: there is none."""
    phases = [event for event in timeline.events if event.kind == "phase" and event.name != "between steps"]
    forwards = [i for i, event in enumerate(phases) if event.name == "forward"]
    if not forwards:
        return None
    step = phases[forwards[-1]:]
    backward = step[1].begin_ns if len(step) > 1 else step[0].end_ns
    return step[0].begin_ns, backward, step[-1].end_ns


def _residency(timeline, begin, end):
    """(group, begin, end) in ns: from a gather to the group's next release."""
    releases = {}
    for event in timeline.events:
        if event.kind == "runtime" and event.name.startswith("FSDP::reshard ("):
            releases.setdefault(event.name[len("FSDP::reshard ("):-1], []).append(event.end_ns)
    for event in timeline.events:
        if event.kind != "collective" or event.name != "all_gather":
            continue
        of_group = releases.get(event.subject, [])
        next_one = bisect.bisect_left(of_group, event.begin_ns)
        until = of_group[next_one] if next_one < len(of_group) else end
        if event.begin_ns < end and until > begin:
            yield event.subject, max(event.begin_ns, begin), min(until, end)


def last_step(timeline):
    span = _span(timeline)
    if span is None:
        return None
    begin, backward, end = span

    def ms(time_ns):
        return (time_ns - begin) / 1e6

    inside = [event for event in timeline.events if begin <= event.begin_ns < end]
    waits = []
    for event in inside:
        operation, _, group = event.name.removeprefix("FSDP::").partition("_wait (")
        if event.kind == "runtime" and group:
            waits.append(Wait(operation, group[:-1], ms(event.begin_ns), ms(event.end_ns)))
    before = [held for held in timeline.bytes if held.time_ns <= begin][-1:]
    held = before + [held for held in timeline.bytes if begin < held.time_ns < end]
    return StepRecord(
        duration_ms=ms(end),
        backward_begin_ms=ms(backward),
        residency=tuple(Residency(group, ms(first), ms(last)) for group, first, last in _residency(timeline, begin, end)),
        collectives=tuple(Collective(event.name, event.subject, ms(event.begin_ns), ms(min(event.end_ns, end)), event.bytes)
                          for event in inside if event.kind == "collective"),
        waits=tuple(waits),
        bytes=tuple(HeldBytes(max(ms(each.time_ns), 0.0), each.unsharded, each.packed, each.live) for each in held),
    )
