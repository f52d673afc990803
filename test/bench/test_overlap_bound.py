"""The bound of all_gather_overlap against an independent computation, and by hand."""

import random
import sys
import unittest
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "test" / "processes")]

import brute_force
import closing_line
import overlap_bound
from overlap_bound import Layer, Machine


def uniform(count, times, **machine):
    return Machine(tuple(Layer(*times, bytes=1) for _ in range(count)), **machine)


def random_machine(draw, queues):
    layers = tuple(Layer(forward=draw.randint(1, 3), backward=draw.randint(1, 4), gather=draw.randint(1, 4),
                         reduce=draw.randint(1, 4), bytes=draw.randint(1, 3)) for _ in range(draw.randint(1, 3)))
    least, most = max(layer.bytes for layer in layers), sum(layer.bytes for layer in layers)
    return Machine(layers, budget=draw.randint(least, most), queues=queues)


class BestSchedule(unittest.TestCase):
    def test_one_layer_gathers_computes_and_reduces_in_turn(self):
        machine = uniform(1, (2, 3, 5, 7))
        self.assertEqual(overlap_bound.bound(machine), (17, True, 17))

    def test_gathers_hide_behind_compute_when_two_layers_fit(self):
        # Gathers of 1 behind computing of 10: only the first, and the last reduction, are seen.
        machine = uniform(6, (10, 20, 1, 2), budget=2)
        self.assertEqual(overlap_bound.bound(machine)[0], 1 + 6 * 30 + 2)

    def test_with_room_for_one_layer_nothing_is_gathered_ahead(self):
        # g f, g f f' as the last layer stays, then g b; reductions hide behind gathers' waits only in part.
        machine = uniform(2, (10, 10, 3, 1), budget=1)
        self.assertEqual(overlap_bound.bound(machine)[0], 3 + 10 + 3 + 10 + 10 + 3 + 10 + 1)

    def test_a_network_that_is_slower_than_everything_is_never_idle(self):
        # Three layers, of which two stay: four gathers and three reductions of 10, and computing of 1 in between.
        machine = uniform(3, (1, 1, 10, 10), budget=2)
        best = overlap_bound.bound(machine)[0]
        self.assertGreaterEqual(best, 70)
        self.assertEqual(best, brute_force.shortest(machine))

    def test_equals_the_brute_force_of_random_machines_with_one_queue(self):
        draw = random.Random(1)
        for case in range(60):
            machine = random_machine(draw, queues=1)
            with self.subTest(case=case, machine=machine):
                self.assertAlmostEqual(overlap_bound.best_schedule(machine), brute_force.shortest(machine))

    def test_equals_the_brute_force_of_random_machines_with_two_queues_and_a_network_each(self):
        draw = random.Random(2)
        for case in range(60):
            machine = random_machine(draw, queues=2)
            # What is all latency takes no bandwidth from the other queue.
            apart = replace(machine, layers=tuple(replace(layer, gather_latency=layer.gather,
                                                          reduce_latency=layer.reduce) for layer in machine.layers))
            with self.subTest(case=case, machine=machine):
                self.assertAlmostEqual(overlap_bound.best_schedule(apart), brute_force.shortest(machine))

    def test_no_schedule_of_two_queues_that_share_a_network_beats_it(self):
        draw = random.Random(4)
        reached = 0
        for case in range(60):
            machine = random_machine(draw, queues=2)
            with self.subTest(case=case, machine=machine):
                best = brute_force.shortest(machine, shares=True)
                self.assertLessEqual(overlap_bound.floor(machine), best + 1e-9)
                reached += overlap_bound.floor(machine) > 0.95 * best
        self.assertGreater(reached, 40)


class BestWithoutClock(unittest.TestCase):
    def test_one_layer_gathers_computes_and_reduces_in_turn(self):
        machine = uniform(1, (2, 3, 5, 7), queues=2)
        self.assertEqual(overlap_bound.bound(machine).time, 5 + 2 + 3 + 7)

    def test_equal_collectives_that_begin_together_share_the_bandwidth_to_their_end(self):
        # A gather of 4 + 2 and a reduction of 4 + 2, of which 2 is sending: side by side 4 + 2 * 2. Computing takes no time.
        layer = Layer(0, 0, gather=6, reduce=6, bytes=1, gather_latency=4, reduce_latency=4)
        machine = Machine((layer, layer), budget=1, queues=2)
        # Gather 0, gather 1, then gather 0 beside reduction 1, then reduction 0.
        self.assertAlmostEqual(overlap_bound.bound(machine).time, 6 + 6 + 8 + 6)

    def test_a_latency_hides_behind_the_other_queue_that_sends(self):
        # The backward of layer 1 ends while gather 0 is sending: reduction 1 has its latency beside that.
        first = Layer(0, 0, gather=8, reduce=2, bytes=1, gather_latency=1, reduce_latency=1)
        last = Layer(5, 5, gather=1, reduce=4, bytes=1, gather_latency=1, reduce_latency=3)
        machine = Machine((first, last), budget=2, queues=2)
        # Gathers until 9, forward until 14, backward until 19; nothing is gathered again. Reductions of 4 and 2.
        self.assertAlmostEqual(overlap_bound.bound(machine).time, 9 + 10 + 4 + 2)

    def test_equals_the_brute_force_of_random_machines(self):
        draw = random.Random(7)
        for case in range(100):
            machine = random_machine(draw, queues=2)
            machine = replace(machine, layers=tuple(
                replace(layer, gather_latency=draw.randint(0, layer.gather - 1),
                        reduce_latency=draw.randint(0, layer.reduce - 1)) for layer in machine.layers))
            if draw.random() < 0.4:
                machine = replace(machine, layers=machine.layers[:1] * len(machine.layers))
            with self.subTest(case=case, machine=machine):
                bound = overlap_bound.bound(machine)
                self.assertAlmostEqual(bound.time, float(brute_force.shortest_without_clock(machine)))
                self.assertLessEqual(bound.floor, bound.time + 1e-9)

    def test_what_is_known_changes_nothing_but_the_time_of_the_search(self):
        machine = uniform(4, (2, 4, 3, 3), queues=2, budget=3)
        best = overlap_bound.bound(machine).time
        self.assertEqual(overlap_bound.bound(machine, known=1.2 * best).time, best)
        self.assertEqual(overlap_bound.bound(machine, known=best).time, best)

    def test_what_is_said_to_be_known_and_cannot_be_is_told_by_a_longer_time(self):
        machine = uniform(4, (2, 4, 3, 3), queues=2, budget=3)
        impossible = 0.9 * overlap_bound.bound(machine).time
        self.assertGreater(overlap_bound.bound(machine, known=impossible).time, impossible)


class SimpleBound(unittest.TestCase):
    def test_is_never_above_the_best_schedule(self):
        draw = random.Random(3)
        for case in range(300):
            machine = random_machine(draw, queues=1)
            with self.subTest(case=case, machine=machine):
                self.assertLessEqual(overlap_bound.simple_bound(machine), overlap_bound.best_schedule(machine) + 1e-9)

    def test_is_taken_where_there_are_too_many_layers(self):
        machine = uniform(13, (10, 20, 1, 2), budget=2)
        self.assertEqual(overlap_bound.bound(machine), (393, False, 393))

    def test_counts_the_layers_that_stay_in_the_middle_once(self):
        machine = uniform(13, (1, 1, 100, 100), budget=3)
        self.assertEqual(overlap_bound.bound(machine)[0], (13 + 10) * 100 + 13 * 100)


class WrongMachines(unittest.TestCase):
    def test_are_named(self):
        with self.assertRaisesRegex(ValueError, "more than the budget"):
            uniform(2, (1, 1, 1, 1), budget=0.5)
        with self.assertRaisesRegex(ValueError, "at least one layer"):
            Machine(())
        with self.assertRaisesRegex(ValueError, "one queue or two, found 3"):
            uniform(2, (1, 1, 1, 1), queues=3)


if __name__ == "__main__":
    closing_line.main()
