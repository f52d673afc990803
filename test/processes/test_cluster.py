"""tools/cluster and its network: ranks reach each other at the link's rate, faults part them, and nothing is left behind."""

import os
import signal
import subprocess
import sys
import time
import unittest
from unittest import mock

import launch
from closing_line import main
from cluster_case import ClusterCase, cluster

COMMAND = [str(launch.ROOT / "tools" / "cluster")]
LISTEN_AT = 5000
# Answers each connection once it has read all that comes over it.
SERVER = f"""
import socket, threading
def answer(connection):
    while connection.recv(1 << 16):
        pass
    connection.sendall(b"!")
    connection.close()
listener = socket.create_server(("", {LISTEN_AT}))
print("listens", flush=True)
while True:
    connection, _ = listener.accept()
    threading.Thread(target=answer, args=(connection,), daemon=True).start()
"""
# Sends some bytes and says whether an answer comes.
CLIENT = f"""
import socket, sys
host, timeout_s, count = sys.argv[1:]
try:
    with socket.create_connection((host, {LISTEN_AT}), timeout=float(timeout_s)) as connection:
        connection.sendall(bytes(int(count)))
        connection.shutdown(socket.SHUT_WR)
        print("answer" if connection.recv(1) else "closed")
except OSError as error:
    print(type(error).__name__)
"""


def of_this_process():
    return [name for name in cluster.namespaces() if name.startswith(f"fsdp-cluster-{os.getpid()}-")]


def of_process(pid):
    return [name for name in cluster.namespaces() if name.startswith(f"fsdp-cluster-{pid}-")]


class Case(ClusterCase):
    def start(self, network, rank, program, *arguments):
        process = network.start(rank, [sys.executable, "-c", program, *map(str, arguments)], stdout=subprocess.PIPE, text=True)
        self.addCleanup(self.end, process)
        return process

    @staticmethod
    def end(process):
        process.kill()
        process.wait()
        process.stdout.close()

    def expect_gone(self, pid):
        deadline = time.monotonic() + launch.patience(20)
        while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
            time.sleep(0.05)
        self.assertFalse(os.path.exists(f"/proc/{pid}"))


class Network(Case):
    def serve(self, network, *ranks):
        for rank in ranks:
            self.assertEqual(self.start(network, rank, SERVER).stdout.readline(), "listens\n")

    def reaches(self, network, rank, other, within_s=None, count=1):
        client = self.start(network, rank, CLIENT, network.address(other), within_s or launch.patience(10), count)
        return client.stdout.read() == "answer\n"

    def test_a_rank_whose_link_is_cut_reaches_nobody_until_it_is_mended(self):
        network = self.new_cluster(3)
        self.serve(network, 1, 2)
        self.assertTrue(self.reaches(network, 0, 1))
        network.cut(1)
        self.assertFalse(self.reaches(network, 0, 1, within_s=0.5))
        self.assertTrue(self.reaches(network, 0, 2))
        network.mend(1)
        self.assertTrue(self.reaches(network, 0, 1))

    def test_ranks_of_one_half_reach_each_other_alone(self):
        network = self.new_cluster(4)
        self.serve(network, 1, 3)
        network.part(2, 3)
        self.assertTrue(self.reaches(network, 0, 1))
        self.assertTrue(self.reaches(network, 2, 3))
        self.assertFalse(self.reaches(network, 0, 3, within_s=0.5))
        network.join(2, 3)
        self.assertTrue(self.reaches(network, 0, 3))

    def test_bytes_take_no_less_time_than_the_rate_says(self):
        network = self.new_cluster(2, "40mbit")
        self.serve(network, 1)
        begin = time.monotonic()
        self.assertTrue(self.reaches(network, 0, 1, count=2_000_000))
        # 0.4 s, less what the buckets let through at once.
        self.assertGreater(time.monotonic() - begin, 0.35)

    def test_two_clusters_side_by_side_know_nothing_of_each_other(self):
        first, second = self.new_cluster(2), self.new_cluster(2)
        self.serve(first, 1)
        self.assertTrue(self.reaches(first, 0, 1))
        self.assertFalse(self.reaches(second, 0, 1))

    def test_processes_end_with_their_cluster_and_nothing_is_left(self):
        with cluster.Cluster(2) as network:
            # A process of a rank's process, too.
            rank = network.start(0, ["sh", "-c", "sleep 1000 & echo $!; wait"], stdout=subprocess.PIPE, text=True)
            below = int(rank.stdout.readline())
        self.end(rank)
        self.expect_gone(below)
        self.assertEqual(of_this_process(), [])

    def test_where_namespaces_are_not_allowed_it_says_why(self):
        with mock.patch("os.geteuid", return_value=1000), self.assertRaisesRegex(cluster.NotAllowed, "need root"):
            cluster.Cluster(2)
        with mock.patch("shutil.which", return_value=None), self.assertRaisesRegex(cluster.NotAllowed, "iproute2"):
            cluster.Cluster(2)
        # As in a container.
        bounded = ["setpriv", "--bounding-set", "-sys_admin", "--inh-caps", "-sys_admin"]
        result = launch.run([*bounded, *COMMAND, "--", "true"])
        self.assertEqual(result.returncode, 2, result.stderr)
        self.assertRegex(result.stderr, "^tools/cluster: network namespaces are not allowed here: .*\n$")


class Command(Case):
    def start_sleeping(self):
        """The command's process, and those of its ranks."""
        # What a shell starts in the background ignores SIGINT, and so would all that this run starts.
        process = subprocess.Popen([*COMMAND, "--ranks", "2", "--", "sh", "-c", "echo $$; exec sleep 1000"],
                                   stdout=subprocess.PIPE, text=True,
                                   preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
        self.addCleanup(self.end, process)
        ranks = [int(process.stdout.readline()) for _ in range(2)]
        return process, ranks

    def test_each_rank_has_torchruns_variables(self):
        result = launch.run([*COMMAND, "--ranks", "3", "--rate", "1gbit", "--", "sh", "-c",
                             "echo $RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE, $MASTER_ADDR $GLOO_SOCKET_IFNAME"])
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(sorted(result.stdout.splitlines()), [f"{rank} of 3, 0 of 1, 10.213.77.1 eth0" for rank in range(3)])

    def test_it_ends_with_the_code_of_the_rank_that_failed(self):
        result = launch.run([*COMMAND, "--ranks", "2", "--", "sh", "-c", "exit $((RANK * 7))"])
        self.assertEqual(result.returncode, 7)
        self.assertEqual(result.stderr, "tools/cluster: rank 1 failed with exit code 7\n")

    def test_a_wrong_call_is_one_line(self):
        for arguments, said in [(["--ranks", "0", "true"], "1 to 200 ranks, not 0"),
                                (["--rate", "fast", "true"], "such as 1gbit, not fast"),
                                (["--", "./none"], "there is no program ./none"), ([], "there is no command to start")]:
            with self.subTest(arguments=arguments):
                result = launch.run([*COMMAND, *arguments])
                self.assertEqual(result.returncode, 2, result.stderr)
                self.assertIn(said, result.stderr.splitlines()[-1])

    def test_a_signal_ends_it_and_nothing_is_left(self):
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            with self.subTest(signal=number):
                process, ranks = self.start_sleeping()
                process.send_signal(number)
                self.assertEqual(process.wait(launch.patience(20)), 128 + number)
                for rank in ranks:
                    self.expect_gone(rank)
                self.assertEqual(of_process(process.pid), [])

    def test_ranks_of_a_killed_one_are_killed_with_it_and_the_next_one_removes_its_namespaces(self):
        process, ranks = self.start_sleeping()
        self.assertEqual(len(of_process(process.pid)), 3)
        process.kill()
        process.wait()
        for rank in ranks:
            self.expect_gone(rank)
        # The next one may be another program's, which runs beside this one: then nothing is left for the one made here.
        self.new_cluster(1)
        self.assertEqual(of_process(process.pid), [])


if __name__ == "__main__":
    cluster.end_on_signals()
    main()
