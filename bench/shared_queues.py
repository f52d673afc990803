"""The best schedule of two queues that share a network's bandwidth, as lib/comm/simulated/simulated_link.cpp carries them.

Each queue carries one collective at a time. A latency passes first and takes no bandwidth; then those that send share
it equally. Schedules are those of a scheduler without a clock: it computes, gathers and reduces at the beginning, and
whenever a computation or a collective has ended, or leaves any of it for the next such moment. Gathers go in the order
of their uses, reductions in that of the backward. All of these schedules are searched (A*).

With a clock more would be possible: equal collectives that begin together stay in step, so that neither sends while
the other's latency passes, and where computing takes as long as they do nothing ends in between. Who could wait for
half a collective's time, once, would shift them.
"""

import heapq
from typing import NamedTuple

NOTHING = 1e-7
IDLE = (0.0, -1.0)  # a queue: latency left, sending left


class State(NamedTuple):
    """What is still to be done; two schedules that come to the same state differ in the time alone."""

    use: int  # that computes or comes next
    computing: float  # what is left of it; -1: it has not begun
    gather: int  # that comes next
    gathering: tuple
    reduction: int
    reducing: tuple


def left_of(queue):
    return queue[0] + max(0.0, queue[1])


def is_idle(queue):
    return queue[1] < 0


class SharedQueues:
    """The schedules of a machine that gathers its layers so often.

    gathers: in the order of their uses: (layer, first use that it is for, use after which it is released)."""

    def __init__(self, machine, gathers):
        self.machine = machine
        layers, self.count = machine.layers, len(machine.layers)
        self.uses = len(machine.uses)
        self.gathers = gathers
        self.gather_of = {use: number for number, (_, *served) in enumerate(gathers) for use in served}
        gathered = [layers[i] for i, _, _ in gathers]
        reduced = [layers[i] for i in machine.uses[self.count:]]
        self.gather_queue = [(layer.gather_latency, layer.gather - layer.gather_latency) for layer in gathered]
        self.reduce_queue = [(layer.reduce_latency, layer.reduce - layer.reduce_latency) for layer in reduced]
        self._sum_up(gathered, reduced)
        self._rooms = {}

    def _sum_up(self, gathered, reduced):
        """What is left at least, from a use, a gather or a reduction on."""
        times = self.machine.times
        last = reduced[-1].reduce
        self.computing_from = [last] * (self.uses + 1)
        for use in reversed(range(self.uses)):
            self.computing_from[use] = self.computing_from[use + 1] + times[use]
        self.gathers_from = [0.0] * (len(gathered) + 1)
        self.gathers_send = [0.0] * (len(gathered) + 1)
        for i in reversed(range(len(gathered))):
            after = max(self.computing_from[self.gathers[i][1]], self.gathers_from[i + 1])
            self.gathers_from[i] = gathered[i].gather + after
            self.gathers_send[i] = self.gathers_send[i + 1] + self.gather_queue[i][1]
        self.reductions_from = [0.0] * (self.count + 1)
        self.reductions_send = [0.0] * (self.count + 1)
        for i in reversed(range(self.count)):
            self.reductions_from[i] = self.reductions_from[i + 1] + reduced[i].reduce
            self.reductions_send[i] = self.reductions_send[i + 1] + self.reduce_queue[i][1]
        self.reductions_after = [0.0] * (self.uses + 1)  # from the beginning of a use on, of those that are not ready
        for use in reversed(range(self.uses)):
            ready = self.reductions_from[use - self.count] if use >= self.count else 0.0
            self.reductions_after[use] = times[use] + max(ready, self.reductions_after[use + 1])

    def best(self, limit):
        """The end of the best schedule, or `limit` if none is shorter."""
        start = State(0, -1.0, 0, IDLE, 0, IDLE)
        waiting = [(self._least(start), 0.0, start)]
        reached = {}
        while waiting:
            least, negative_time, state = heapq.heappop(waiting)
            if least >= limit - NOTHING:
                break
            time = -negative_time
            if self._is_known(reached, state, time):
                continue
            if state.use == self.uses and state.reduction == self.count and is_idle(state.reducing):
                return time
            for begun in self._decisions(state):
                passed, after = self._until_next_end(begun)
                least = time + passed + self._least(after)
                if least < limit - NOTHING:
                    # Of equal ones the furthest first.
                    heapq.heappush(waiting, (round(least, 6), -(time + passed), after))
        return limit

    @staticmethod
    def _is_known(reached, state, time):
        key = (state.use, round(state.computing, 5), state.gather, round(state.gathering[0], 5),
               round(state.gathering[1], 5), state.reduction, round(state.reducing[0], 5), round(state.reducing[1], 5))
        if reached.get(key, float("inf")) <= time + NOTHING:
            return True
        reached[key] = time
        return False

    def _least(self, state):
        """No schedule goes on from here in less time."""
        use, computing, gather, gathering, reduction, reducing = state
        least = left_of(reducing) + self.reductions_from[reduction]
        if use < self.uses:
            begun = self.machine.times[use] - computing if computing >= 0 else 0.0
            least = max(least, self.computing_from[use] - begun, self.reductions_after[use] - begun)
        arrives = left_of(gathering)
        if not is_idle(gathering):
            least = max(least, arrives + self.computing_from[self.gathers[gather - 1][1]])
        if gather < len(self.gathers):
            least = max(least, arrives + self.gathers_from[gather])
        sent = max(0.0, gathering[1]) + max(0.0, reducing[1])
        return max(least, sent + self.gathers_send[gather] + self.reductions_send[reduction])

    def _decisions(self, state):
        """What may begin now: all of it, any part, or none if something is under way."""
        use, computing, gather, gathering, reduction, reducing = state
        arrived = gather - (not is_idle(gathering))
        computations = [computing]
        if computing < 0 and use < self.uses and self.gather_of[use] < arrived:
            computations.append(self.machine.times[use])
        gathers = [(gather, gathering)]
        if is_idle(gathering) and gather < len(self.gathers) and self._has_room(use, gather):
            gathers.append((gather + 1, self.gather_queue[gather]))
        reductions = [(reduction, reducing)]
        if is_idle(reducing) and reduction < min(self.count, use - self.count):
            reductions.append((reduction + 1, self.reduce_queue[reduction]))
        for computes in computations:
            for gathered in gathers:
                for reduced in reductions:
                    if computes >= 0 or not is_idle(gathered[1]) or not is_idle(reduced[1]):
                        yield State(use, computes, *gathered, *reduced)

    def _has_room(self, use, gather):
        """For this gather beside those before it, once the uses before `use` are over."""
        if (use, gather) not in self._rooms:
            layers = self.machine.layers
            taken = sum(layers[i].bytes for i, _, last in self.gathers[:gather] if last >= use)
            self._rooms[use, gather] = taken + layers[self.gathers[gather][0]].bytes <= self.machine.budget
        return self._rooms[use, gather]

    @staticmethod
    def _until_next_end(state):
        """(the time until a computation or collective ends, the state then)."""
        use, computing, gather, gathering, reduction, reducing = state
        passed = 0.0
        while True:
            sharers = sum(not is_idle(queue) and queue[0] <= 0 for queue in (gathering, reducing))
            step = computing if computing >= 0 else float("inf")
            for latency, sending in (gathering, reducing):
                if sending >= 0:
                    step = min(step, latency if latency > 0 else sending * sharers)
            passed += step
            ended = False
            if computing >= 0:
                computing -= step
                if computing <= NOTHING:
                    use, computing, ended = use + 1, -1.0, True
            queues = []
            for latency, sending in (gathering, reducing):
                if sending >= 0 and latency > 0:
                    latency = latency - step if latency - step > NOTHING else 0.0
                elif sending >= 0:
                    sending -= step / sharers
                if sending >= 0 and latency <= 0 and sending <= NOTHING:
                    latency, sending = IDLE
                    ended = True
                queues.append((latency, sending))
            gathering, reducing = queues
            if ended:
                return passed, State(use, computing, gather, gathering, reduction, reducing)
