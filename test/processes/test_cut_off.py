"""A rank that does not reach the rendezvous store, at the start or amid a step: it ends in time, and says why."""

import signal
import socket
import subprocess
import tempfile
import unittest

import launch
from closing_line import main
from cluster_case import new_cluster, skip_if_refused
from silent_proxy import SilentProxy

# What a rank may take for its last words after its timeout.
LAST_WORDS_S = 10


class CutOff(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        launch.write_text(folder.name)
        cls.timeout_s = launch.patience(8)
        cls.arguments = [*launch.TINY, "--data", folder.name, "--steps", "1000000", "--timeout"]

    def start(self, rank, ranks, timeout_s, **more):
        return self.ended(launch.start_rank(rank, ranks, launch.TRAIN, *self.arguments, timeout_s, **more))

    def ended(self, process):
        """The process, which ends with the test at the latest."""
        self.addCleanup(self.end, process)
        return process

    @staticmethod
    def end(process):
        if process.poll() is None:
            process.kill()
        process.communicate()

    def errors_of(self, process, within_s):
        """What a rank says that has failed by then."""
        try:
            _, errors = process.communicate(timeout=within_s)
        except subprocess.TimeoutExpired:
            self.fail(f"the rank still runs after {within_s:.0f} s")
        self.assertEqual(process.returncode, 1, errors)
        return errors

    def expect_last_words(self, process):
        errors = self.errors_of(process, self.timeout_s + launch.patience(LAST_WORDS_S))
        self.assertRegex(errors, r"all_gather|reduce_scatter|all_reduce")
        if "all_reduce of 'loss'" in errors:
            return  # the trainer's own average, on the transport itself: nobody compares ranks for it
        self.assertIn("the rendezvous store has not answered", errors)
        self.assertRegex(errors, r"rank 1: .*last launched \d+: ")

    def test_a_rank_that_the_store_does_not_answer_ends_with_what_it_knows(self):
        port = launch.unused_port()
        proxy = SilentProxy(port)
        self.addCleanup(proxy.close)
        first = self.start(0, 2, self.timeout_s, MASTER_PORT=port)
        second = self.start(1, 2, self.timeout_s, MASTER_PORT=proxy.port)
        launch.wait_for_line(first, "step ")
        proxy.fall_silent()
        first.send_signal(signal.SIGSTOP)
        self.expect_last_words(second)

    def test_a_rank_whose_link_is_cut_ends_with_what_it_knows(self):
        skip_if_refused()
        network = new_cluster(self, 2)
        first, second = (self.ended(network.start(rank, [launch.TRAIN, *self.arguments, self.timeout_s], text=True,
                                                  stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=launch.environment()))
                         for rank in network.ranks)
        launch.wait_for_line(first, "step ")
        network.cut(1)
        self.expect_last_words(second)
        self.assertIn("timed out", self.errors_of(first, self.timeout_s + launch.patience(LAST_WORDS_S)).lower())

    def test_a_store_that_accepts_and_says_nothing_is_given_up(self):
        silent = socket.create_server(("127.0.0.1", 0))
        self.addCleanup(silent.close)
        port = silent.getsockname()[1]
        errors = self.errors_of(self.start(1, 2, 1, MASTER_PORT=port), within_s=launch.patience(60))
        self.assertIn(f"what accepts connections at 127.0.0.1:{port} has not answered within", errors)

    def test_a_rendezvous_that_fails_says_one_line(self):
        port = launch.unused_port()
        errors = self.errors_of(self.start(1, 2, 1, MASTER_PORT=port), within_s=launch.patience(60))
        self.assertIn(f"on rank 1 of 2: nothing could be reached at 127.0.0.1:{port} within 1000 ms: Connection refused; "
                      "rank 0 serves the rendezvous there", errors)
        self.assertEqual(errors.count("\n"), 1, errors)


if __name__ == "__main__":
    main()
