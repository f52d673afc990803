"""Ranks whose network breaks while they train: each goes on with the results that it would have had, or ends in time with one
readable error; every checkpoint is whole; no process is left. A usual run has a few of the faults, each in one world."""

import os
import random
import signal
import tempfile
import time
import unittest

import cluster_faults
import launch
from closing_line import main
from cluster_case import ClusterCase, cluster
from cluster_faults import Fault

# Bits a second, at which a layer's gather or reduction takes more than a second.
SLOW = 1e6
RANDOM_FAULTS = 20


class Case(ClusterCase):
    timeout_s = launch.patience(4)

    def start(self, ranks=2, **settings):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        network = self.new_cluster(ranks, cluster_faults.RATE)
        run = cluster_faults.Run(network, folder.name, self.timeout_s, **settings)
        self.addCleanup(run.close)
        return run

    def start_and_wait(self, place, ranks, **settings):
        run = self.start(ranks, wait_at=place, **settings)
        run.await_line(f"at {place}")
        return run

    def judge(self, run):
        said, broken = cluster_faults.judge(run)
        self.assertEqual(broken, [], "\n".join(f"--- rank {each.rank}, code {each.code}\n{each.text}" for each in said))
        return said

    def expect_results(self, run):
        self.assertEqual([each.code for each in self.judge(run)], [0] * len(run.processes))

    def expect_errors(self, run, pattern="failed|schedule"):
        for each in self.judge(run):
            self.assertNotEqual(each.code, 0, each.text)
            self.assertRegex(each.error, pattern)


def in_worlds(*worlds):
    """Runs a test for each pair of a number of ranks and a rank; in a usual run for the first pair."""
    def decorate(test):
        def run_all(self):
            for ranks, victim in worlds if launch.is_thorough() else worlds[:1]:
                with self.subTest(ranks=ranks, victim=victim):
                    test(self, ranks, victim)
        return run_all
    return decorate


thorough = unittest.skipUnless(launch.is_thorough(), "for a run that is thorough")


class ALinkGoesDown(Case):
    """Rank 0 serves the store."""

    def cut_in(self, place, ranks, victim, **settings):
        """While the bytes of what comes after that place are on their way."""
        run = self.start_and_wait(place, ranks, **settings)
        run.network.set_rate(SLOW)
        run.go_on()
        time.sleep(0.3)
        return run.meet(Fault("cut", [victim]))

    @in_worlds((3, 1), (2, 0), (4, 0), (4, 3))
    def test_in_a_gather(self, ranks, victim):
        self.expect_errors(self.cut_in("forward 4", ranks, victim), "all_gather of 'layer0'")

    @thorough
    @in_worlds((2, 1), (2, 0), (4, 0), (4, 3))
    def test_in_a_reduction(self, ranks, victim):
        self.expect_errors(self.cut_in("backward 4", ranks, victim, reshard=0), "reduce_scatter of 'layer2'")

    @thorough
    @in_worlds((2, 1), (2, 0), (4, 0), (4, 3))
    def test_in_the_schedule_check_before_a_collective(self, ranks, victim):
        run = self.start_and_wait("forward 4", ranks, compare_every=1)
        fault = Fault("cut", [victim])
        fault.begin(run)
        run.go_on()
        self.expect_errors(run.meet(fault), "all_gather of '?layer0")

    @thorough
    @in_worlds((2, 1), (2, 0), (3, 2))
    def test_while_ranks_disagree(self, ranks, victim):
        run = self.start_and_wait("forward 4", ranks, disagree_at=4)
        fault = Fault("cut", [victim])
        fault.begin(run)
        run.go_on()
        self.expect_errors(run.meet(fault))

    @in_worlds((2, 1), (2, 0), (3, 2))
    def test_in_a_checkpoints_commit(self, ranks, victim):
        run = self.start_and_wait("save 5", ranks)
        run.go_on()
        # The manifest is the last that is written before the folder gets its name.
        while not list(run.saves.glob(".step-5*/*manifest*")) and not (run.saves / "step-5").exists():
            self.assertFalse(run.look())
        run.processes[0].send_signal(signal.SIGSTOP)
        fault = Fault("cut", [victim])
        fault.begin(run)
        run.processes[0].send_signal(signal.SIGCONT)
        self.expect_errors(run.meet(fault))
        self.assertTrue((run.saves / "step-2").exists())


class OneIsSlow(Case):
    @thorough
    @in_worlds((2, 1), (3, 0), (4, 3))
    def test_a_link_a_hundred_times_slower_changes_no_result(self, ranks, victim):
        run = self.start_and_wait("forward 4", ranks)
        run.go_on()
        self.expect_results(run.meet(Fault("slow", [victim], lasts_s=2 * self.timeout_s)))

    @thorough
    @in_worlds((2, 1), (3, 0), (4, 3))
    def test_a_rank_that_is_stopped_for_less_than_the_timeout_changes_no_result(self, ranks, victim):
        run = self.start(ranks)
        run.await_line("step 4")
        self.expect_results(run.meet(Fault("stop", [victim], lasts_s=self.timeout_s / 2)))

    @in_worlds((3, 1), (2, 0), (4, 3))
    def test_a_rank_that_is_stopped_for_longer_ends_all(self, ranks, victim):
        run = self.start(ranks)
        run.await_line("step 4")
        self.expect_errors(run.meet(Fault("stop", [victim], lasts_s=1.5 * self.timeout_s)))


class TwoHalves(Case):
    @in_worlds((4, 2), (2, 1), (3, 2))
    def test_that_meet_again_soon_go_on(self, ranks, first):
        run = self.start(ranks)
        run.await_line("step 4")
        self.expect_results(run.meet(Fault("part", list(range(first, ranks)), lasts_s=self.timeout_s / 5)))

    @thorough
    @in_worlds((4, 2), (2, 1), (3, 2))
    def test_that_meet_again_too_late_have_ended(self, ranks, first):
        run = self.start(ranks)
        run.await_line("step 4")
        self.expect_errors(run.meet(Fault("part", list(range(first, ranks)), lasts_s=1.5 * self.timeout_s)))


class RandomFaults(Case):
    @thorough
    def test_each_keeps_what_is_promised(self):
        first = int(os.environ.get("FSDP_TEST_SEED", random.randrange(1 << 30)))
        for seed in range(first, first + RANDOM_FAULTS):
            with self.subTest(seed=seed):
                record, _ = cluster_faults.run_draw(cluster_faults.draw(seed, self.timeout_s), self.timeout_s)
                self.assertEqual(record["broken"], [], record)


if __name__ == "__main__":
    cluster.end_on_signals()
    main()
