"""Mixed precision against FSDP2: the same policies, weights and data, through module boundaries.

On two ranks every loss, gradient and weight agrees bit for bit. On more, the two sums add up in another
order, and agree within what one rounding of the reduce dtype allows.

Where the two differ on purpose:
- reduce_dtype unset: here the dtype that gradients are computed in, as in FSDP1 and in FSDP2 before
  torch 2.15; since then FSDP2 takes the parameters' own. The worker asks for param_dtype there.
- sums in float16 of gradients in float32: here the division before the sum comes before the cast, so
  that what fits after it does not overflow; FSDP2 casts first. Below float16's normal range (6e-5)
  the one rounds once and the other twice, so that row has a tolerance.
"""

import functools
import unittest
from pathlib import Path

from closing_line import main
from row_results import row_results

WORKER = Path(__file__).with_name("fsdp2_mixed_worker.py")
WIDTH, INNER, OUTPUTS, BLOCKS, BATCH, MICRO_BATCHES = 6, 8, 2, 3, 4, 2
STEPS = 4
BLOCK = WIDTH + 2 * WIDTH + 2 * WIDTH * INNER + INNER + WIDTH
PARAMETERS = WIDTH * WIDTH + WIDTH + BLOCKS * BLOCK + OUTPUTS * WIDTH + OUTPUTS
BF16, FP16, FP32 = "bfloat16", "float16", "float32"
# Of the largest value: what the order of four summands may change, in units of the last place.
ROUNDING = {FP32: 1e-6, FP16: 4e-3, BF16: 3e-2}
LARGEST_AFTER_STEPS = 3e-2  # when roundings to the low precision have gone different ways

ROWS = [
    {"name": "no policy"},
    {"name": "bf16, sums in fp32", "param": BF16, "reduce": FP32},
    {"name": "bf16, sums in bf16", "param": BF16, "reduce": BF16},
    {"name": "bf16, reduce_dtype unset", "param": BF16},
    {"name": "fp16, sums in fp32", "param": FP16, "reduce": FP32},
    {"name": "fp16, sums in fp16", "param": FP16, "reduce": FP16},
    {"name": "sums in bf16", "reduce": BF16},
    {"name": "sums in fp16", "reduce": FP16, "tolerance": 1e-3},
    {"name": "outputs in fp32", "param": BF16, "reduce": FP32, "output": FP32},
    {"name": "inputs not cast", "param": BF16, "reduce": FP32, "cast_forward_inputs": False, "input": BF16},
    {"name": "a parameter kept in fp32", "param": BF16, "reduce": FP32, "keep_scale": True},
    {"name": "accumulated, sums in fp32", "param": BF16, "reduce": FP32, "accumulate": True},
    {"name": "accumulated, sums in bf16", "param": BF16, "reduce": BF16, "accumulate": True},
    {"name": "divided by 3", "param": BF16, "reduce": FP32, "divide_factor": 3, "force_sum": True},
    {"name": "fp16 divided by 3", "param": FP16, "reduce": FP16, "divide_factor": 3},
    {"name": "fp16 divided by 8", "param": FP16, "reduce": FP16, "divide_factor": 8},
]


@functools.lru_cache
def results_of(ranks):
    """(libfsdp's, FSDP2's): for each rank what each row gave."""
    return row_results(ranks, ROWS, "fsdp2_mixed", WORKER, "fsdp2", weights=PARAMETERS, weights_scale=0.7,
                       inputs=ranks * STEPS * MICRO_BATCHES * BATCH * WIDTH)


class Fsdp2MixedPrecision(unittest.TestCase):
    def expect_close(self, found, expected, relative, what):
        self.assertEqual(len(found), len(expected), what)
        largest = max(abs(value) for value in expected)
        for place, (a, b) in enumerate(zip(found, expected)):
            self.assertLessEqual(abs(a - b), relative * largest, f"{what}, element {place}: {a} and {b}")

    def for_rows(self, ranks, check):
        for rank, (ours, theirs) in enumerate(zip(*results_of(ranks))):
            for row in ROWS:
                found, expected = ours[row["name"]], theirs[row["name"]]
                with self.subTest(row=row["name"], rank=rank):
                    if "skipped" in expected:
                        self.skipTest(expected["skipped"])
                    check(row, found, expected)

    def test_two_ranks_agree_bit_for_bit(self):
        def check(row, found, expected):
            tolerance = row.get("tolerance", 0)
            self.expect_close(found["losses"], expected["losses"], tolerance, "losses")
            for step in range(STEPS):
                self.expect_close(found["gradients"][step], expected["gradients"][step], tolerance,
                                  f"gradients of step {step}")
            self.expect_close(found["weights"], expected["weights"], tolerance, "weights")

        self.for_rows(2, check)

    def test_four_ranks_agree_within_the_rounding_of_the_sums(self):
        def check(row, found, expected):
            rounding = ROUNDING[row.get("reduce") or row.get("param") or FP32]
            batches = MICRO_BATCHES if row.get("accumulate") else 1
            self.expect_close(found["losses"][:batches], expected["losses"][:batches], 0, "losses of the first step")
            self.expect_close(found["gradients"][0], expected["gradients"][0], rounding, "gradients of the first step")
            self.expect_close(found["weights"], expected["weights"], LARGEST_AFTER_STEPS, "weights")

        self.for_rows(4, check)

    def test_float16_is_divided_by_the_same_rule(self):
        libfsdp, fsdp2 = results_of(2)
        self.assertEqual(libfsdp[0]["divisions"], fsdp2[0]["divisions"])
        self.assertEqual(libfsdp[0]["divisions"][8 - 1], [4, 2])
        self.assertEqual(libfsdp[0]["divisions"][6 - 1], [4, 1.5])


if __name__ == "__main__":
    main()
