"""How soon a step can end: no schedule of gathers, releases and reductions does better within its memory.

The machine: one thing computes, the layers forward and then backward in their order. A layer computes only while its
parameters are gathered; they take their bytes from the start of their gather until they are released, and all of them
together never more than the budget. A layer's gradients can be reduced once its backward is over. The network carries
one collective after another (`queues=1`), or has a queue for gathers and one for reductions, which share its
bandwidth (`queues=2`). Which parameters stay between forward and backward (of those in `may_stay`), in which order
collectives go, and when each begins is for the schedule to choose. What packed gradients take is not counted: that
could only raise the bound.

Up to `EXHAUSTIVE` layers the best schedule is searched for exhaustively; beyond that the bound is the largest of
several that each leave something out. With two queues there are two figures. `Bound.time` is that of the best
schedule without a clock (shared_queues.py): whatever begins does so when something else has ended, as it must be where
all ranks are to launch the same. No schedule at all is shorter than `Bound.floor`, which leaves out most of what the
queues lose to each other; who could wait for parts of a collective's time comes near it.
"""

from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple

from shared_queues import SharedQueues

EXHAUSTIVE = 12
ROUNDING = 1e-6
CLEARLY = 1e-3


@dataclass(frozen=True)
class Layer:
    forward: float
    backward: float
    gather: float  # alone on the network
    reduce: float
    bytes: int
    gather_latency: float = 0.0  # of `gather`: what takes no bandwidth
    reduce_latency: float = 0.0


@dataclass(frozen=True)
class Machine:
    layers: tuple
    budget: float = float("inf")
    queues: int = 1
    may_stay: frozenset | None = None  # layers that need not be released after forward; None: all
    uses: tuple = field(init=False, compare=False)  # layers in the order of computing
    times: tuple = field(init=False, compare=False)

    def __post_init__(self):
        if not self.layers:
            raise ValueError("overlap_bound: expected at least one layer, found none")
        if self.queues not in (1, 2):
            raise ValueError(f"overlap_bound: expected one queue or two, found {self.queues}")
        largest = max(layer.bytes for layer in self.layers)
        if largest > self.budget:
            raise ValueError(f"overlap_bound: a layer takes {largest} bytes, more than the budget of {self.budget}")
        if self.may_stay is None:
            object.__setattr__(self, "may_stay", frozenset(range(len(self.layers))))
        order = [*range(len(self.layers))]
        object.__setattr__(self, "uses", tuple(order + order[::-1]))
        object.__setattr__(self, "times", tuple([layer.forward for layer in self.layers]
                                                + [layer.backward for layer in self.layers[::-1]]))


class Bound(NamedTuple):
    time: float
    is_reachable: bool  # by a schedule that a search has found
    floor: float  # no schedule is shorter, with a clock or without


def bound(machine, known=float("inf")):
    """known: what some schedule has been seen to take, which spares a search what takes clearly longer."""
    least = floor(machine)
    if len(machine.layers) > EXHAUSTIVE:
        return Bound(least, False, least)
    if machine.queues == 1:
        return Bound(least, True, least)
    return Bound(best_without_clock(machine, known * (1 + CLEARLY)), True, least)


def floor(machine):
    simple = simple_bound(machine)
    return simple if len(machine.layers) > EXHAUSTIVE else max(simple, best_schedule(machine))


def best_without_clock(machine, limit):
    floors = sorted((Search(machine, kept).run(limit), sorted(kept)) for kept in kept_sets(machine))
    best = limit
    for least, kept in floors:
        if least >= best - ROUNDING:
            break
        best = min(best, SharedQueues(machine, gathers_of(machine, kept)).best(best))
    return best


# --- Bounds that leave something out.

def least_gathers(machine, cost):
    """The sum of `cost(layer)` over all gathers of a step, at least: what stays is there together in the middle."""
    room, saved = machine.budget, 0.0
    stay = [machine.layers[i] for i in machine.may_stay]
    for layer in sorted(stay, key=lambda layer: -cost(layer) / max(layer.bytes, 1)):
        part = min(1.0, room / layer.bytes) if layer.bytes else 1.0
        saved += part * cost(layer)
        room -= part * layer.bytes
        if room <= 0:
            break
    return 2 * sum(cost(layer) for layer in machine.layers) - saved


def simple_bound(machine):
    layers = machine.layers
    first, last = layers[0], layers[-1]
    compute = sum(machine.times)
    gathers = least_gathers(machine, lambda layer: layer.gather)
    reductions = sum(layer.reduce for layer in layers)
    sent = (least_gathers(machine, lambda layer: layer.gather - layer.gather_latency)
            + sum(layer.reduce - layer.reduce_latency for layer in layers))
    return max(
        first.gather + compute + first.reduce,
        gathers + first.backward + first.reduce,
        first.gather + sum(layer.forward for layer in layers) + last.backward + reductions,
        gathers + reductions if machine.queues == 1 else sent,
    )


# --- The best schedule.

def classes_of(values):
    """Numbers for equal values, in the order of their appearance."""
    known = {}
    return [known.setdefault(value, len(known)) for value in values]


def kept_sets(machine):
    """Which layers stay from forward to backward. Of layers with equal gathers and bytes it is as well to keep the
    last ones: keeping an earlier one takes its memory for longer, and leaves a gather that is needed sooner."""
    kinds = classes_of([(layer.gather, layer.bytes) for layer in machine.layers])
    members = [[i for i, kind in enumerate(kinds) if kind == chosen and i in machine.may_stay]
               for chosen in range(max(kinds) + 1)]
    for counts in product(*(range(len(group) + 1) for group in members)):
        kept = {i for group, count in zip(members, counts) for i in group[len(group) - count:]}
        if sum(machine.layers[i].bytes for i in kept) <= machine.budget:
            yield kept


def gathers_of(machine, kept):
    """In the order of their uses: (layer, first use that it is for, use after which it is released)."""
    count = len(machine.layers)
    gathers = [(i, i, 2 * count - 1 - i if i in kept else i) for i in range(count)]
    return gathers + [(i, 2 * count - 1 - i, 2 * count - 1 - i) for i in reversed(range(count)) if i not in kept]


def best_schedule(machine):
    best = float("inf")
    for kept in sorted(kept_sets(machine), key=len, reverse=True):
        best = min(best, Search(machine, kept).run(best))
    return best


class Search:
    """The best schedule that keeps certain layers: a dynamic program over how many gathers and reductions of each
    kind have been started, with the states that no other one of the same counts beats in every respect."""

    def __init__(self, machine, kept):
        self.machine = machine
        layers, count = machine.layers, len(machine.layers)
        self.gathers = gathers_of(machine, kept)
        self.gather_of = {use: number for number, (_, *served) in enumerate(self.gathers) for use in served}
        # Equal gathers, and equal reductions, are started in the order of their uses: exchanging them changes nothing.
        self.gather_lines = self._lines([(layers[i].gather, layers[i].bytes) for i, _, _ in self.gathers])
        backwards = list(range(count, 2 * count))
        reduces = backwards if machine.queues == 1 else []
        self.reduce_lines = [[reduces[i] for i in line] for line in self._lines([layers[machine.uses[u]].reduce
                                                                                 for u in reduces])]
        self.total = len(self.gathers) + len(reduces)
        self.sent_in_reductions = sum(layer.reduce - layer.reduce_latency for layer in layers)
        self.tail_compute = [sum(machine.times[u:]) for u in range(2 * count + 1)]
        self.work = (sum(layers[i].gather for i, _, _ in self.gathers)
                     + (sum(layer.reduce for layer in layers) if machine.queues == 1 else 0.0))

    @staticmethod
    def _lines(values):
        kinds = classes_of(values)
        return [[i for i, kind in enumerate(kinds) if kind == chosen] for chosen in range(max(kinds, default=-1) + 1)]

    def run(self, best):
        """The end of the best schedule, or `best` if none is better."""
        start = (0,) * (len(self.gather_lines) + len(self.reduce_lines))
        level = {start: [State(0.0, (), self.work)]}
        for _ in range(self.total):
            following = {}
            for counts, states in level.items():
                for state in states:
                    for counts_after, after in self._steps(counts, state):
                        if self._least(after) < best - ROUNDING:
                            insert(following.setdefault(counts_after, []), after)
            level = following
        ends = [self._end(state) for states in level.values() for state in states]
        return min([best, *ends])

    def _least(self, state):
        """No schedule that begins like this ends sooner."""
        free, ends, work, shared = state
        first = self.machine.layers[0]
        computed = ends[-1] if ends else 0.0
        least = computed + self.tail_compute[len(ends)] + first.reduce
        if self.machine.queues == 1:
            return max(least, free + work)
        return max(least, free + work + first.backward + first.reduce, self._reduced(ends), shared)

    def _end(self, state):
        if self.machine.queues == 1:
            return max(state.free, state.ends[-1])
        return max(self._reduced(state.ends), state.shared)

    def _reduced(self, ends):
        """Reductions that have a queue of their own, one after another."""
        free = 0.0
        for use in range(len(self.machine.layers), len(ends)):
            free = max(free, ends[use]) + self.machine.layers[self.machine.uses[use]].reduce
        return free

    def _steps(self, counts, state):
        free, ends, work, shared = state
        lines = len(self.gather_lines)
        idle_until = float("inf")  # a reduction that fits in before a gather delays nothing
        for number, line in enumerate(self.reduce_lines):
            done = counts[lines + number]
            if done == len(line) or line[done] >= len(ends):
                continue
            duration = self.machine.layers[self.machine.uses[line[done]]].reduce
            end = max(free, ends[line[done]]) + duration
            idle_until = min(idle_until, end)
            yield raised(counts, lines + number), State(end, ends, work - duration, shared)
        issued = {gather for number, line in enumerate(self.gather_lines) for gather in line[:counts[number]]}
        for number, line in enumerate(self.gather_lines):
            if counts[number] == len(line):
                continue
            gather = line[counts[number]]
            begin = self._room_from(gather, issued, free, ends)
            if begin is None or idle_until <= begin:
                continue
            layer = self.machine.layers[self.gathers[gather][0]]
            end = begin + layer.gather
            after = self._compute(issued | {gather}, gather, end, ends)
            carried = self._shared(shared, layer, end, after)
            yield raised(counts, number), State(end, after, work - layer.gather, carried)

    def _shared(self, shared, layer, end, ends):
        """When a network that both queues share has carried all reductions, and the gathers so far: it can begin with
        the first reduction when the last layer's backward is over, and carries gathers alone until then."""
        first = len(self.machine.layers)
        if self.machine.queues == 1 or len(ends) <= first:
            return 0.0
        sent_after = max(0.0, min(layer.gather - layer.gather_latency, end - ends[first]))
        return (shared or ends[first] + self.sent_in_reductions) + sent_after

    def _room_from(self, gather, issued, free, ends):
        """When there is room for it, from `free` on; None: not before more has been gathered."""
        layers = self.machine.layers
        needed = layers[self.gathers[gather][0]].bytes
        taken, releases = 0, []
        for other in issued:
            layer, _, last = self.gathers[other]
            release = ends[last] if last < len(ends) else float("inf")
            if release > free:
                taken += layers[layer].bytes
                releases.append((release, layers[layer].bytes))
        begin = free
        for release, size in sorted(releases):
            if taken + needed <= self.machine.budget:
                break
            begin, taken = release, taken - size
        return begin if taken + needed <= self.machine.budget and begin != float("inf") else None

    def _compute(self, issued, newest, arrival, ends):
        """All uses that can go on now. What was gathered before `newest` and is not used yet has waited for it."""
        ends = list(ends)
        while len(ends) < len(self.machine.uses) and self.gather_of[len(ends)] in issued:
            use = len(ends)
            begin = ends[-1] if ends else 0.0
            # Uses wait in line: those behind the one that `newest` is for begin after it has arrived.
            begin = max(begin, arrival) if self.gathers[newest][1] <= use else begin
            ends.append(begin + self.machine.times[use])
        return tuple(ends)


class State(NamedTuple):
    free: float  # the queue of gathers, from then on
    ends: tuple  # of the uses that what has been gathered allows
    work: float  # of the queue, still to be started
    shared: float = 0.0  # see `_shared`


def raised(counts, position):
    return counts[:position] + (counts[position] + 1,) + counts[position + 1:]


def insert(states, new):
    """Keeps those that are not beaten."""
    def beats(one, other):
        return (one.free <= other.free and one.shared <= other.shared
                and all(a <= b for a, b in zip(one.ends, other.ends)))

    if any(beats(known, new) for known in states):
        return
    states[:] = [known for known in states if not beats(new, known)] + [new]
