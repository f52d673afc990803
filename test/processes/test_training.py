"""The trainer on real processes: however many ranks, the same training."""

import json
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path

import launch
from closing_line import main

STEPS = 30


class Training(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.data = tempfile.mkdtemp(prefix="fsdp-text-")
        cls.addClassCleanup(shutil.rmtree, cls.data)
        launch.write_text(cls.data)
        cls.plain = launch.train(1, cls.data, "--no-shard", "--steps", STEPS)

    def expect_equal(self, record, plain):
        self.assertEqual(len(record["losses"]), len(plain["losses"]))
        for step, (loss, expected) in enumerate(zip(record["losses"], plain["losses"])):
            self.assertAlmostEqual(loss, expected, delta=1e-4 * expected, msg=f"step {step}")
        self.assertAlmostEqual(record["val_bits_per_byte"], plain["val_bits_per_byte"],
                               delta=1e-3 * plain["val_bits_per_byte"])

    def test_the_plain_model_learns(self):
        self.assertLess(self.plain["losses"][-1], 0.8 * self.plain["losses"][0])

    def test_one_rank_trains_as_the_plain_model(self):
        self.expect_equal(launch.train(1, self.data, "--steps", STEPS), self.plain)

    def test_one_rank_says_once_that_it_shards_nothing_and_others_do_not(self):
        said = "one rank: nothing is communicated, copied or released"
        for ranks, options, times in ((1, [], 1), (2, [], 0), (1, ["--no-shard"], 0)):
            result = launch.run_training(ranks, self.data, "--steps", 2, *options)
            self.assertEqual(result.stderr.count(said), times, result.stderr)

    def test_two_ranks_train_as_the_plain_model(self):
        record = launch.train(2, self.data, "--steps", STEPS)
        self.expect_equal(record, self.plain)
        self.assertEqual(record["ranks"], 2)
        self.assertEqual(record["parameters"], self.plain["parameters"])

    def test_two_ranks_hold_half_of_the_parameters(self):
        record = launch.train(2, self.data, "--steps", 3)
        whole = 4 * record["parameters"]
        self.assertAlmostEqual(record["sharded_parameter_bytes"], whole / 2, delta=0.01 * whole)
        self.assertGreater(record["peak_unsharded_bytes"], 0)
        self.assertLessEqual(record["peak_unsharded_bytes"], whole * 1.01)

    def test_a_timeline_shows_every_rank_and_a_report_every_group(self):
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            result = launch.run_training(2, self.data, "--steps", 6, "--timeline", file.name, "--report")
            events = json.loads(Path(file.name).read_text())["traceEvents"]
            self.expect_no_loss_in_perfetto(file.name)
        self.assertEqual({event["pid"] for event in events}, {0, 1})
        forwards = [event for event in events if event["name"] == "forward" and event["pid"] == 1]
        self.assertEqual(len(forwards), 3, "three steps are recorded")
        gathered = {event["args"]["module"] for event in events if event["ph"] == "b"}
        self.assertEqual(gathered, {"root", "blocks.0", "blocks.1"})
        for words in ("blocks.1", "order of use: forward", "under a byte budget"):
            self.assertIn(words, result.stdout)

    def expect_no_loss_in_perfetto(self, file):
        """Perfetto's trace processor, where there is one, takes every slice."""
        program = shutil.which("trace_processor_shell") or shutil.which("trace_processor")
        if program is None:
            return
        query = "select name, value from stats where severity in ('error', 'data_loss') and value > 0;"
        result = subprocess.run([program, "-Q", query, file], capture_output=True, text=True, check=True)
        self.assertEqual(result.stdout.split(), ['"name","value"'])

    def test_four_ranks_train_as_the_plain_model(self):
        self.expect_equal(launch.train(4, self.data, "--steps", STEPS), self.plain)

    def test_parameters_kept_over_two_of_four_ranks_change_nothing(self):
        record = launch.train(4, self.data, "--steps", STEPS, "--reshard-after-forward", 2)
        self.expect_equal(record, self.plain)

    def test_parameters_kept_after_forward_change_nothing(self):
        record = launch.train(2, self.data, "--steps", STEPS, "--reshard-after-forward", "false")
        self.expect_equal(record, self.plain)

    def test_an_output_tied_to_the_embedding_trains_as_the_plain_model(self):
        plain = launch.train(1, self.data, "--no-shard", "--steps", 10, "--tied-output")
        self.expect_equal(launch.train(2, self.data, "--steps", 10, "--tied-output"), plain)
        self.assertLess(plain["parameters"], self.plain["parameters"])


if __name__ == "__main__":
    main()
