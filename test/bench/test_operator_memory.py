"""What an operator of a step has alive; run by test_benchmarks.py, which builds what counts it."""

import sys
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "bench" / "pytorch"), str(ROOT / "test" / "processes")]

import closing_line
import torch
import worker
from memory_bound import Group, Operator, lower_bound
from operator_memory import operators_of

KIB = 1 << 10


class OperatorsOfAStep(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.extension = worker.extension()
        cls.extension.install_counting_allocator()

    def operators(self, layers, x):
        def step():
            y = x
            for layer in layers:
                y = layer(y)
            y.sum().backward()

        return operators_of(step, [list(layer.parameters()) for layer in layers], self.extension)

    def test_of_two_layers(self):
        torch.manual_seed(0)
        layers = [torch.nn.Linear(16, 64, bias=False), torch.nn.Linear(64, 32, bias=False)]  # 4 and 8 KiB
        x = torch.ones(128, 16)
        others = self.extension.live_bytes() - 12 * KIB  # the input, and what the process has otherwise
        operators = self.operators(layers, x)
        reads = [tuple(each["reads"]) for each in operators if each["reads"]]
        self.assertEqual(reads, [(0,), (1,), (1,)], "forward, and backward to the first layer's output")
        self.assertEqual([each["gradients"] for each in operators if each["gradients"]],
                         [[(1, 8 * KIB)], [(0, 4 * KIB)]])
        alive = {tuple(each["reads"]): each["alive"] for each in reversed(operators)}
        self.assertEqual(alive[0,], others + 128 * 64 * 4, "the input, and the output")
        self.assertEqual(alive[1,], others + (128 * 64 + 128 * 32) * 4, "and the next output")

    def test_a_gradient_at_an_address_that_was_another_tensors(self):
        """The allocator gives memory back: the last tensor at the gradient's address is the gradient."""
        torch.manual_seed(0)
        layers = [torch.nn.Linear(32, 32) for _ in range(6)]
        operators = self.operators(layers, torch.ones(32, 32))
        made = [group for each in operators for group, _ in each["gradients"]]
        self.assertEqual(sorted(made), sorted([*range(6), *range(6)]))
        self.assertEqual(made, sorted(made, reverse=True), "backward goes from the last layer to the first")

    def test_the_bound_of_one_rank_is_the_peak(self):
        torch.manual_seed(0)
        layers = [torch.nn.Linear(48, 48) for _ in range(4)]
        groups = [list(layer.parameters()) for layer in layers]
        x = torch.ones(64, 48)
        operators = [Operator(each["alive"], tuple(), tuple(each["gradients"])) for each in self.operators(layers, x)]
        for parameters in groups:
            for parameter in parameters:
                parameter.grad = None
        self.extension.start_recording()
        y = x
        for layer in layers:
            y = layer(y)
        y.sum().backward()
        sizes = [sum(parameter.nbytes for parameter in parameters) for parameters in groups]
        self.assertEqual(lower_bound(operators, [Group(size, size) for size in sizes]), self.extension.peak_bytes())


if __name__ == "__main__":
    closing_line.main()
