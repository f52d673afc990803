"""The examples in C++ run on ranks that are processes, and the quick start's page shows the one of its name."""

import re
import tempfile
import unittest

import launch
import quickstarts
from closing_line import main

EXAMPLES = launch.BUILD / "examples"


class Examples(unittest.TestCase):
    def run_on(self, ranks, name, *arguments):
        program = EXAMPLES / name
        ran = launch.run([program, *arguments]) if ranks == 1 else launch.run_ranks(ranks, program, *arguments)
        self.assertEqual(ran.returncode, 0, f"{name}: {ran.stdout[-1000:]}\n{ran.stderr[-2000:]}")
        return ran.stdout

    def expect_falling(self, output):
        (first, last), = re.findall(r"loss ([\d.]+) -> ([\d.]+)", output)
        self.assertLess(float(last), 0.75 * float(first))

    def test_the_quick_starts_page_shows_the_program_that_runs_here(self):
        self.assertEqual(quickstarts.cpp_program(), (launch.ROOT / "examples" / "quickstart.cpp").read_text())
        losses = quickstarts.losses(self.run_on(2, "quickstart"))[0]
        self.assertEqual(len(losses), 20)
        self.assertLess(sum(losses[-5:]) / 5, 0.75 * losses[0], losses)

    def test_the_code_of_the_guides_runs(self):
        self.assertIn("rank 0: all guides ran", self.run_on(2, "guides"))

    def test_a_module_of_ones_own_trains_in_bfloat16(self):
        output = self.run_on(2, "mlp")
        self.assertIn("blocks.3: 6; 66,432, 66,432; Shard(0)", output)
        self.expect_falling(output)

    def test_two_models_train_in_turns(self):
        self.assertRegex(self.run_on(2, "gan"), r"rank 0: the points are 0\.\d+ away from the circle")

    def test_replicas_of_shards_train(self):
        output = self.run_on(4, "hsdp")
        self.assertIn("(Replicate(), Shard(0))", output)
        self.expect_falling(output)

    def test_replicas_train(self):
        self.expect_falling(self.run_on(2, "ddp"))

    def test_a_run_that_goes_on_with_another_number_of_ranks_has_the_losses_of_one_that_was_not_stopped(self):
        def losses(output):
            return {int(step): float(loss) for step, loss in re.findall(r"step (\d+): loss ([\d.]+)", output)}

        with tempfile.TemporaryDirectory() as folder:
            whole = losses(self.run_on(1, "checkpoint_resume", f"{folder}/whole", 14))
            begun = losses(self.run_on(2, "checkpoint_resume", f"{folder}/parts", 10))
            resumed = losses(self.run_on(1, "checkpoint_resume", f"{folder}/parts", 14))
        self.assertEqual((sorted(begun), sorted(resumed)), (list(range(1, 11)), list(range(11, 15))))
        for step, loss in {**begun, **resumed}.items():
            self.assertAlmostEqual(loss, whole[step], delta=1e-4, msg=f"step {step}")


if __name__ == "__main__":
    main()
