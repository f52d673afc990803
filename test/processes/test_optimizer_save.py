"""torch::save of an optimizer on ranks that have it at other addresses, and so write it in other orders."""

import re
import unittest

import launch
from closing_line import main


class OptimizerSave(unittest.TestCase):
    def compare(self, ranks, at_least):
        at_least //= 1 if launch.is_thorough() else 2
        result = launch.run_ranks(ranks, launch.RANK_PROGRAMS, "optimizer_save", timeout_s=200)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        compared, different = re.search(r"(\d+) compared, (\d+) in orders", result.stdout).groups()
        self.assertGreaterEqual(int(compared), at_least)
        # Or nothing is tested: with twelve parameters two orders are hardly ever the same.
        self.assertGreaterEqual(int(different), at_least // 2)

    def test_two_ranks(self):
        self.compare(2, 16)

    @unittest.skipUnless(launch.is_thorough(), "thorough runs only")
    def test_three_ranks(self):
        self.compare(3, 12)

    def test_four_ranks_with_replicas_and_with_tensor_parallelism(self):
        self.compare(4, 20)


if __name__ == "__main__":
    main()
