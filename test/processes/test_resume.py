"""Training that is killed and resumed, by real processes: whatever the number of ranks, the same losses."""

import fcntl
import json
import os
import shutil
import tempfile
import time
import unittest
from pathlib import Path

import launch
from closing_line import main

STEPS = 30
# Each number of ranks after each other one.
RANKS = [1, 2, 1, 3, 1, 4, 2, 3, 2, 4, 3, 4, 1]
# The tiny model's global batch is 8, which three ranks do not divide.
DEFAULTS = {**dict(zip(launch.TINY[::2], launch.TINY[1::2])), "--global-batch": 12, "--steps": STEPS}


def step_of(checkpoint):
    return int(checkpoint.name.removeprefix("step-"))


class Resume(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = Path(tempfile.mkdtemp(prefix="fsdp-resume-"))
        cls.addClassCleanup(shutil.rmtree, cls.folder)
        cls.data = cls.folder / "data"
        cls.data.mkdir()
        launch.write_text(cls.data)
        cls.never_killed = cls.train(1, "--save", cls.folder / "whole", "--save-every", 10)

    @classmethod
    def options(cls, *more):
        default = {"--data": cls.data, **DEFAULTS}
        return [part for name, value in default.items() if name not in more for part in (name, value)] + [*more]

    @classmethod
    def start(cls, ranks, *more):
        return launch.start_by_hand(ranks, launch.TRAIN, *cls.options(*more))

    @classmethod
    def train(cls, ranks, *more):
        """A run to its end: its record."""
        with tempfile.TemporaryDirectory() as folder:
            record = Path(folder) / "record.json"
            for process in cls.start(ranks, "--json", record, *more):
                output, errors = process.communicate(timeout=launch.patience(100))
                if process.returncode != 0:
                    raise AssertionError(f"exit code {process.returncode}\n{output}\n{errors}")
            return json.loads(record.read_text())

    def train_until(self, step, ranks, run, *more):
        """Kills the last rank once a checkpoint of `step` or later is there. Returns the step of the last checkpoint, one
        more at the most: however late the kill is, the save after that finds a lock that this test holds."""
        run.mkdir(exist_ok=True)
        with (run / f".step-{step + 2}.fsdp-lock").open("w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            try:
                return self.kill_after(step, ranks, run, *more)
            finally:
                os.unlink(held.name)

    def kill_after(self, step, ranks, run, *more):
        processes = self.start(ranks, "--save", run, "--save-every", 1, "--keep", 2, *more)
        for process in processes:
            self.addCleanup(process.kill)
        deadline = time.monotonic() + launch.patience(60)
        while not any(step_of(checkpoint) >= step for checkpoint in run.glob("step-*")):
            ended = [process for process in processes if process.poll() is not None]
            if ended or time.monotonic() > deadline:
                for process in processes:
                    process.kill()
                self.fail(f"{ranks} ranks saved no step {step}: {[process.communicate() for process in processes]}")
            time.sleep(0.001)
        processes[-1].kill()
        for process in processes:
            process.communicate(timeout=launch.patience(60))  # the others see it, and end
            self.assertNotEqual(process.returncode, 0, "the run was over before it was killed")
        return max(step_of(checkpoint) for checkpoint in run.glob("step-*"))

    def expect_equal(self, record, expected):
        self.assertEqual(len(record["losses"]), STEPS)
        for step, (loss, other) in enumerate(zip(record["losses"], expected["losses"])):
            self.assertAlmostEqual(loss, other, delta=1e-4 * other, msg=f"step {step}")
        self.assertAlmostEqual(record["val_bits_per_byte"], expected["val_bits_per_byte"], delta=1e-3)

    def test_killed_and_resumed_by_every_number_of_ranks_after_every_other(self):
        run = self.folder / "killed"
        step, resume = 0, []
        for ranks in RANKS[:-1]:
            step = self.train_until(step + 1, ranks, run, *resume)
            resume = ["--resume", run]
        self.assertLess(step, STEPS)
        record = self.train(RANKS[-1], "--save", run, "--keep", 2, *resume)
        self.assertEqual(record["resumed_at_step"], step)
        self.expect_equal(record, self.never_killed)
        self.assertEqual({file.name for file in run.iterdir()}, {f"step-{step}", f"step-{STEPS}"}, "leftovers")

    def test_the_same_number_of_ranks_goes_on_to_the_bit(self):
        record = self.train(1, "--resume", self.folder / "whole" / "step-10")
        self.assertEqual(record["resumed_at_step"], 10)
        self.assertEqual(record["losses"], self.never_killed["losses"])
        self.assertEqual(record["sample"], self.never_killed["sample"])

    def test_the_plain_model_goes_on_from_a_sharded_one(self):
        self.expect_equal(self.train(1, "--no-shard", "--resume", self.folder / "whole" / "step-20"), self.never_killed)

    def test_a_finished_run_goes_on_with_more_steps(self):
        record = self.train(2, "--resume", self.folder / "whole", "--steps", STEPS + 2, "--learning-rate", 1e-3)
        self.assertEqual(record["losses"][:STEPS], self.never_killed["losses"])
        self.assertEqual(len(record["losses"]), STEPS + 2)

    def test_a_timeline_of_a_resumed_run_has_three_steps(self):
        file = self.folder / "timeline.json"
        self.train(2, "--resume", self.folder / "whole" / "step-20", "--timeline", file)
        events = json.loads(file.read_text())["traceEvents"]
        self.assertEqual(len([event for event in events if event["name"] == "forward" and event["pid"] == 0]), 3)

    def expect_refusal(self, message, *more):
        result = launch.run([launch.TRAIN, "--check", *self.options(*more)])
        self.assertEqual((result.returncode, result.stdout), (2, ""), result.stderr)
        self.assertEqual(result.stderr.count("\n"), 1, result.stderr)
        self.assertIn(message, result.stderr)

    def test_another_run_s_checkpoint_is_refused(self):
        whole = self.folder / "whole" / "step-20"
        self.expect_refusal("saved with --layers 2, but this run has --layers 3", "--resume", whole, "--layers", 3)
        self.expect_refusal("saved with no --tied-output, but this run has --tied-output", "--resume", whole, "--tied-output")
        self.expect_refusal("saved with --global-batch 12, --seed 1, but this run has --global-batch 24, --seed 2",
                            "--resume", whole, "--seed", 2, "--global-batch", 24)
        self.expect_refusal("saved with --data of 66301 bytes", "--resume", whole, "--data", self.data / "part0.txt")

    def test_what_is_no_checkpoint_of_a_run_is_refused(self):
        whole = self.folder / "whole" / "step-20"
        self.expect_refusal("there is no such folder", "--resume", self.folder / "nothing")
        self.expect_refusal("it has no checkpoint in it", "--resume", self.data)
        self.expect_refusal("no checkpoint of tools/train", "--resume", whole / "model.safetensors")

    def test_a_run_without_a_step_left_is_refused(self):
        self.expect_refusal("it is at step 30 already", "--resume", self.folder / "whole")
        self.expect_refusal("--timeline records from the third step on, and 2 are left", "--resume", self.folder / "whole",
                            "--steps", STEPS + 2, "--timeline", self.folder / "timeline.json")

    def test_later_checkpoints_of_another_run_are_not_mixed_in(self):
        whole = self.folder / "whole"
        self.expect_refusal("this run begins after step 0; go on from there with --resume", "--save", whole)
        self.expect_refusal("this run begins after step 10", "--save", whole, "--resume", whole / "step-10")

    def test_a_damaged_checkpoint_is_refused(self):
        damaged = self.folder / "damaged" / "step-10"
        shutil.copytree(self.folder / "whole" / "step-10", damaged)
        with (damaged / "optimizer.safetensors").open("r+b") as file:
            file.seek(-1, 2)
            last = file.read(1)
            file.seek(-1, 2)
            file.write(bytes([last[0] ^ 1]))
        self.expect_refusal("optimizer.safetensors: bytes 0 to", "--resume", damaged)

    def test_a_save_that_fails_ends_the_run_on_all_ranks(self):
        run = self.folder / "blocked"
        (run / "step-2").mkdir(parents=True)
        (run / "step-2" / "mine").write_text("no checkpoint")
        processes = self.start(2, "--save", run, "--save-every", 1)
        for process in processes:
            self.addCleanup(process.kill)
        for process, (_, errors) in [(process, process.communicate(timeout=launch.patience(60))) for process in processes]:
            self.assertEqual(process.returncode, 1, errors)
            self.assertIn("is no checkpoint", errors)
        self.assertEqual({file.name for file in run.iterdir()}, {"step-1", "step-2"})


if __name__ == "__main__":
    main()
