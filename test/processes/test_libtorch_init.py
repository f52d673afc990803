"""torch::nn::init on sharded tensors draws what the plain program draws, on ranks with generators of their own."""

import re
import unittest

import launch
from closing_line import main


class LibtorchInit(unittest.TestCase):
    def compare(self, ranks, at_least):
        at_least //= 1 if launch.is_thorough() else 3
        result = launch.run_ranks(ranks, launch.RANK_PROGRAMS, "libtorch_init", timeout_s=200)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        self.assertGreaterEqual(int(re.search(r"(\d+) compared", result.stdout)[1]), at_least)

    @unittest.skipUnless(launch.is_thorough(), "thorough runs only")
    def test_one_rank(self):
        self.compare(1, 2000)

    def test_two_ranks(self):
        self.compare(2, 2000)

    @unittest.skipUnless(launch.is_thorough(), "thorough runs only")
    def test_three_ranks(self):
        self.compare(3, 2000)

    def test_four_ranks_in_one_dimension_and_in_two(self):
        self.compare(4, 4000)


if __name__ == "__main__":
    main()
