"""The lower bound of memory, by hand."""

import sys
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "test" / "processes")]

import closing_line
from memory_bound import Group, Operator, lower_bound


def two_layers(**second):
    return [Group(whole=100, local=25), Group(**{"whole": 60, "local": 15, **second})]


def forward():
    return [Operator(alive=7, reads=(0,), gradients=()), Operator(alive=9, reads=(1,), gradients=())]


class LowerBound(unittest.TestCase):
    def test_an_operator_needs_what_it_reads_beside_all_shards(self):
        self.assertEqual(lower_bound(forward(), two_layers()), max(7 + 100, 9 + 60) + 25 + 15)

    def test_a_gradient_is_whole_until_its_group_has_all_and_a_shard_then(self):
        operators = [Operator(0, (), ((0, 70),)), Operator(0, (), ((0, 30),)), Operator(200, (), ())]
        self.assertEqual(lower_bound(operators[:1], two_layers()), 40 + 70)
        self.assertEqual(lower_bound(operators[:2], two_layers()), 40 + 100)
        self.assertEqual(lower_bound(operators, two_layers()), 40 + 200 + 25)

    def test_a_kept_group_is_there_from_its_first_use_to_its_last_gradient(self):
        kept = two_layers(is_kept=True)
        # Where nothing reads the second layer, it is there all the same, but not before its first use or after its gradient.
        self.assertEqual(lower_bound([*forward(), Operator(0, (0,), ())], kept), 40 + 100 + 60)
        before = [Operator(50, (0,), ()), Operator(0, (1,), ())]
        self.assertEqual(lower_bound(before, kept), 40 + 50 + 100)
        after = [Operator(0, (1,), ((1, 60),)), Operator(90, (0,), ())]
        self.assertEqual(lower_bound(after, kept), 40 + 90 + 100 + 15)

    def test_on_one_rank_it_is_the_plain_step(self):
        """Where a shard is the whole, and is counted as such, nothing is gathered beside it."""
        operators = [Operator(5, (), ()), Operator(30, (), ((0, 100),)), Operator(2, (), ((1, 60),))]
        self.assertEqual(lower_bound(operators, [Group(100, 100), Group(60, 60)]), 160 + max(30 + 100, 2 + 100 + 60))


if __name__ == "__main__":
    closing_line.main()
