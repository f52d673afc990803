"""Worker processes that stay alive and measure when asked, so that implementations can take turns.

A worker reads one JSON request a line and answers with one line that starts with `@reply `. Idle workers block on
their input and cost nothing.
"""

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

REPLY = "@reply "


class WorkerError(Exception):
    """A worker ended, was silent for too long, or said that it failed."""


class Worker:
    def __init__(self, name, command, environment=None, timeout_s=300):
        self.name = name
        self.timeout_s = timeout_s
        self._stderr = tempfile.TemporaryFile(mode="w+")
        self._lines = queue.Queue()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONHASHSEED": "0",
                 **(environment or {})},
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def send(self, request):
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._fail("ended before a request could be sent")

    def receive(self):
        while True:
            try:
                line = self._lines.get(timeout=self.timeout_s)
            except queue.Empty:
                self._fail(f"gave no answer within {self.timeout_s} s")
            if line is None:
                self._fail(f"ended with exit code {self._process.wait()} instead of answering")
            if line.startswith(REPLY):
                return json.loads(line[len(REPLY):])

    def ask(self, request):
        self.send(request)
        return self.receive()

    def _fail(self, what):
        self._stderr.seek(0)
        last_words = self._stderr.read()[-3000:]
        raise WorkerError(f"worker {self.name} {what}; its last words:\n{last_words}")

    def close(self, wait_s=0):
        """Ends the worker; with `wait_s` it may end by itself first."""
        try:
            self._process.stdin.close()
            self._process.wait(timeout=wait_s)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            self._process.kill()
            self._process.wait()


class World:
    """The ranks of one implementation: one worker each, joined by gloo on this machine, or on a network of namespaces
    (tools/cluster.py)."""

    def __init__(self, name, command, size, timeout_s=300, cluster=None):
        self._folder = tempfile.TemporaryDirectory(prefix="fsdp_bench_")
        self._ranks = []
        for rank in range(size):
            environment = {
                "RANK": str(rank), "WORLD_SIZE": str(size),
                "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size),
                "FSDP_BENCH_STORE": str(Path(self._folder.name) / "store"),
                **(cluster.environment(rank) if cluster else {}),
            }
            before = cluster.before(rank) if cluster else []
            self._ranks.append(Worker(f"{name}[{rank}]", [*before, *command], environment, timeout_s))

    def ask(self, request):
        """Every rank's reply, in rank order."""
        for rank in self._ranks:
            rank.send(request)
        return [rank.receive() for rank in self._ranks]

    def close(self):
        for rank in self._ranks:
            rank.close()
        self._folder.cleanup()


class Workers:
    """Everything started with `start` or `start_world`, ended together. Use it in a `with`."""

    def __init__(self):
        self._open = []

    def start(self, name, command, environment=None, timeout_s=300):
        return self._keep(Worker(name, command, environment, timeout_s))

    def start_world(self, name, command, size, timeout_s=300, cluster=None):
        return self._keep(World(name, command, size, timeout_s, cluster))

    def _keep(self, worker):
        self._open.append(worker)
        return worker

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for worker in self._open:
            worker.close()


def pytorch_command(script):
    return [sys.executable, str(Path(__file__).parent / "pytorch" / script)]


def fsdp_command(build_dir, subcommand):
    return [str(Path(build_dir) / "bench" / "fsdp_bench"), subcommand]


def overlap_command(build_dir):
    return [str(Path(build_dir) / "bench" / "fsdp_bench_overlap")]
