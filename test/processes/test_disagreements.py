"""Ranks over gloo that do not do the same: all of them say the same about it, and none hangs."""

import os
import unittest

import launch
from closing_line import main


class Disagreements(unittest.TestCase):
    def run_ranks(self, what, ranks=2, within_s=40):
        processes = launch.start_by_hand(ranks, launch.RANK_PROGRAMS, "rank_disagreement", what,
                                         FSDP_TEST_TIMEOUT_MS=launch.patience(6000))
        try:
            outputs = [process.communicate(timeout=launch.patience(within_s)) for process in processes]
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                    process.communicate()
        return [process.returncode for process in processes], outputs

    def expect_same_error(self, what, *parts, ranks=2):
        codes, outputs = self.run_ranks(what, ranks)
        self.assertEqual(codes, [3] * ranks, outputs)
        said = [out for out, _ in outputs]
        self.assertEqual(said, [said[0]] * ranks)
        for part in parts:
            self.assertRegex(said[0], part)

    def test_ranks_that_agree_train_to_the_end_in_silence(self):
        codes, outputs = self.run_ranks("agree")
        self.assertEqual(codes, [0, 0], outputs)
        self.assertEqual(outputs, [("", "")] * 2)

    def test_other_branches_of_one_size(self):
        self.expect_same_error("branches", "the ranks disagree about collective", "rank 0: all_gather of root",
                               "rank 1: all_gather of layer1", "in common before it")

    def test_fewer_modules_on_one_of_three_ranks(self):
        self.expect_same_error("fewer", "ranks 0, 2: ", "rank 1: ", ranks=3)

    def test_other_shapes(self):
        self.expect_same_error("shapes", r"rank 0: all_gather of layer0 \(1,088 bytes, Float\)",
                               r"rank 1: all_gather of layer0 \(2,400 bytes, Float\)")

    def test_gradients_of_fewer_parameters(self):
        self.expect_same_error("gradients", "rank 0: reduce_scatter of layer0")

    def test_a_read_on_one_rank(self):
        self.expect_same_error("reads", "rank 1: all_gather of layer2")

    def test_a_call_on_one_rank(self):
        self.expect_same_error("alone", "rank 0: all_gather of layer0",
                               "rank 1: all_gather of 'full_tensor of layer2.weight', which belongs to no group of the model")

    def test_with_detail_too(self):
        os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
        self.addCleanup(os.environ.pop, "TORCH_DISTRIBUTED_DEBUG")
        self.expect_same_error("branches", "rank 0: all_gather of root", "rank 1: all_gather of layer1")
        codes, outputs = self.run_ranks("agree")
        self.assertEqual(codes, [0, 0], outputs)

    def test_a_rank_whose_model_is_gone(self):
        codes, outputs = self.run_ranks("ends")
        self.assertEqual(codes, [3, 0], outputs)
        self.assertIn("rank 1 has ended before the others", outputs[0][0])
        self.assertIn("all_gather of layer0 cannot complete", outputs[0][0])

    def test_a_rank_that_is_late_is_reported_before_the_timeout_and_with_it(self):
        codes, outputs = self.run_ranks("sleeps")
        self.assertEqual(codes[0], 1, outputs)
        for text in outputs[0]:  # the error, and the log
            self.assertIn("all_gather of layer0 is late: rank 0 has waited", text)
            self.assertIn("rank 1: in no collective of this model", text)
        self.assertIn("failed: all_gather of 'layer0'", outputs[0][0])

    def test_a_rank_that_does_not_come_to_a_call_is_reported_before_the_timeout_and_with_it(self):
        codes, outputs = self.run_ranks("does not come")
        self.assertEqual(codes[0], 1, outputs)
        for text in outputs[0]:  # the error, and the log
            self.assertIn("all_gather of 'full_tensor of layer2.weight' is late: rank 0 has waited", text)
            self.assertIn("rank 1: in no collective", text)


if __name__ == "__main__":
    main()
