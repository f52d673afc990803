"""The shortest step of a few layers with whole-numbered times, by trying everything: at every moment the network may
start any collective that there is room for, or stay idle, and anything not in use may be released. It shares no line
and no reasoning with bench/overlap_bound.py."""

import heapq
from fractions import Fraction
from itertools import count as numbers


def shortest(machine, shares=False):
    """The end of the shortest schedule. Two queues carry one collective each at a time, at full speed; `shares`: both
    at half the speed while both do (collectives then begin and end at whole times only)."""
    count = len(machine.layers)
    uses = [*range(count), *reversed(range(count))]
    # (use that computes or comes next, time left of it or None, queues as (what, layer, left), resident, to be reduced)
    idle = (None,) * machine.queues
    states = {(0, None, idle, frozenset(), frozenset())}
    time = 0
    while True:
        reached = set()
        for state in states:
            reached |= all_decisions(machine, uses, state)
        if any(use == len(uses) and queues == idle and not waiting for use, _, queues, _, waiting in reached):
            return time
        states = {after for state in reached for after in [one_unit_later(machine, uses, state, shares)]}
        time += 1


def bytes_of(machine, resident, queues):
    gathering = {slot[1] for slot in queues if slot and slot[0] == "gather"}
    return sum(machine.layers[i].bytes for i in resident | gathering)


def all_decisions(machine, uses, state, in_order=False):
    """What may be the case at this moment once everything has been decided, `state` itself among it."""
    found, open_states = set(), [state]
    while open_states:
        now = open_states.pop()
        if now in found:
            continue
        found.add(now)
        open_states += decisions(machine, uses, now, in_order)
    return found


def decisions(machine, uses, state, in_order):
    use, left, queues, resident, waiting = state
    computing = uses[use] if left is not None else None
    if left is None and use < len(uses) and uses[use] in resident:
        layer = machine.layers[uses[use]]
        yield use, layer.forward if use < len(machine.layers) else layer.backward, queues, resident, waiting
    for i in resident:
        if i != computing:
            yield use, left, queues, resident - {i}, waiting
    gathering = {slot[1] for slot in queues if slot and slot[0] == "gather"}
    absent = [i for i in uses[use:] if i not in resident | gathering]
    for i, layer in enumerate(machine.layers):
        if queues[0] is None and i in (absent[:1] if in_order else absent):
            if bytes_of(machine, resident, queues) + layer.bytes <= machine.budget:
                yield use, left, (("gather", i, layer.gather), *queues[1:]), resident, waiting
    for i in ([max(waiting)] if in_order and waiting else waiting):
        if queues[-1] is None:
            yield use, left, (*queues[:-1], ("reduce", i, machine.layers[i].reduce)), resident, waiting - {i}


def one_unit_later(machine, uses, state, shares):
    use, left, queues, resident, waiting = state
    if left is not None:
        left -= 1
        if left == 0:
            if use >= len(machine.layers):
                waiting = waiting | {uses[use]}
            use, left = use + 1, None
    after = []
    speed = 0.5 if shares and all(queues) else 1
    for slot in queues:
        if slot is not None:
            what, i, remaining = slot
            slot = (what, i, remaining - speed) if remaining > speed else None
            if slot is None and what == "gather":
                resident = resident | {i}
        after.append(slot)
    return use, left, tuple(after), resident, waiting


def shortest_without_clock(machine):
    """The end of the shortest schedule of two queues that share the bandwidth, of those that decide only at the
    beginning and when a computation or a collective has ended, gather nothing before what is used sooner, and reduce in
    the order of the backward."""
    count = len(machine.layers)
    uses = [*range(count), *reversed(range(count))]
    number = numbers()
    open_states, known = [(Fraction(), next(number), (0, None, (None, None), frozenset(), frozenset()))], set()
    while True:
        time, _, state = heapq.heappop(open_states)
        if state in known:
            continue
        known.add(state)
        for now in all_decisions(machine, uses, state, in_order=True):
            use, left, queues, _, waiting = now
            if left is not None or any(queues):
                passed, after = until_something_ends(machine, uses, now)
                heapq.heappush(open_states, (time + passed, next(number), after))
            elif use == len(uses) and not waiting:
                return time


def until_something_ends(machine, uses, state):
    use, left, queues, resident, waiting = state
    passed = Fraction()
    while True:
        sends = [slot is not None and slot[2] <= sending_of(machine, slot) for slot in queues]
        speeds = [Fraction(1, sum(sends)) if sends_now else Fraction(1) for sends_now in sends]
        steps = [] if left is None else [Fraction(left)]
        for slot, sends_now, speed in zip(queues, sends, speeds):
            if slot is not None:
                steps.append(slot[2] / speed if sends_now else Fraction(slot[2] - sending_of(machine, slot)))
        step = min(steps)
        passed += step
        left = None if left is None else left - step
        queues = tuple(slot and (*slot[:2], slot[2] - step * speed) for slot, speed in zip(queues, speeds))
        ended = [slot for slot in queues if slot and slot[2] == 0]
        if left == 0:
            if use >= len(machine.layers):
                waiting = waiting | {uses[use]}
            use, left = use + 1, None
        elif not ended:
            continue
        resident = resident | {i for what, i, _ in ended if what == "gather"}
        return passed, (use, left, tuple(None if slot in ended else slot for slot in queues), resident, waiting)


def sending_of(machine, slot):
    what, i, _ = slot
    layer = machine.layers[i]
    return layer.gather - layer.gather_latency if what == "gather" else layer.reduce - layer.reduce_latency
