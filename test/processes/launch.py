"""Starts ranks as processes, through torchrun or by hand, and reads what they leave."""

import fcntl
import functools
import json
import math
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BUILD = Path(os.environ["FSDP_BUILD_DIR"])
ROOT = Path(__file__).resolve().parents[2]
TRAIN = BUILD / "tools" / "llama" / "fsdp_train"
RANK_PROGRAMS = BUILD / "test" / "processes" / "fsdp_test_ranks"  # of C++, by name
TINY = ["--layers", "2", "--dim", "32", "--heads", "2", "--context", "32", "--global-batch", "8",
        "--warmup", "5", "--eval-bytes", "2048", "--sample-bytes", "20"]


def is_thorough():
    """True for a run that is to take every combination (tools/test --thorough), and not a part of them."""
    return os.environ.get("FSDP_TEST_THOROUGH") == "1"


@functools.cache
def slowness():
    """How many times longer than on an idle machine a computation takes on this one; 1 at least."""
    begin = time.monotonic()
    sum(range(5_000_000))
    return max(1, math.ceil((time.monotonic() - begin) / 0.1))


def patience(idle_s):
    """A time that an idle machine would be given, for this one."""
    return idle_s * slowness()


def environment(**more):
    """One thread a rank, and no launcher's variables but those given."""
    left_out = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    return {**kept, "OMP_NUM_THREADS": "1", **{name: str(value) for name, value in more.items()}}


def run(command, timeout_s=120, **more):
    return subprocess.run([str(part) for part in command], env=environment(**more), text=True,
                          capture_output=True, timeout=patience(timeout_s))


def torchrun(ranks, program, *arguments):
    """The command that starts `ranks` processes of a program."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks,
            "--no-python", program, *arguments]


_LOCKS = []  # kept as long as this process


def unused_port():
    """A port that nobody listens at, and that no other test of this machine gets while this one runs.

    It lies below those that the kernel hands out for connections.
    """
    folder = Path(tempfile.gettempdir(), f"fsdp-ports-{os.getuid()}")
    folder.mkdir(exist_ok=True)
    for port in random.Random().sample(range(20000, 32000), 1000):
        lock = open(folder / str(port), "w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
        except OSError:
            lock.close()
            continue
        _LOCKS.append(lock)
        return port
    raise RuntimeError("no port from 20000 to 31999 is free")


def rank_environment(rank, ranks, **more):
    """The environment of one rank's process."""
    return environment(RANK=rank, WORLD_SIZE=ranks, LOCAL_RANK=rank, LOCAL_WORLD_SIZE=ranks,
                       **{"MASTER_ADDR": "127.0.0.1", **more})


def start_rank(rank, ranks, program, *arguments, before=(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, **more):
    """One rank's process. before: of its command; more: of its environment."""
    return subprocess.Popen([str(part) for part in (*before, program, *arguments)], text=True, stdout=stdout, stderr=stderr,
                            env=rank_environment(rank, ranks, **more))


def start_by_hand(ranks, program, *arguments, **more):
    """The ranks' processes, with nobody to end the others when one fails."""
    port = unused_port()
    return [start_rank(rank, ranks, program, *arguments, MASTER_PORT=port, **more) for rank in range(ranks)]


def run_ranks(ranks, program, *arguments, timeout_s=120, start=start_rank, **more):
    """Runs a program on `ranks` processes, without a launcher's time. When one fails, all are ended. Returns what `run` does,
    of the ranks that have failed or of rank 0. start: makes a rank's process.
    """
    port = unused_port()
    processes = []
    with tempfile.TemporaryDirectory() as folder:
        outputs, errors = ([Path(folder, f"{rank}.{what}") for rank in range(ranks)] for what in ("out", "err"))
        try:
            for rank in range(ranks):
                with outputs[rank].open("w") as stdout, errors[rank].open("w") as stderr:
                    processes.append(start(rank, ranks, program, *arguments, stdout=stdout, stderr=stderr,
                                           MASTER_PORT=port, **more))
            deadline = time.monotonic() + patience(timeout_s)
            while True:
                codes = [process.poll() for process in processes]
                failed = [rank for rank, code in enumerate(codes) if code]
                if failed or None not in codes:
                    break
                if time.monotonic() > deadline:
                    raise subprocess.TimeoutExpired(program, timeout_s, outputs[0].read_text(), errors[0].read_text())
                time.sleep(0.02)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        shown = failed or [0]
        return subprocess.CompletedProcess([program, *arguments], codes[shown[0]],
                                           *("".join(texts[rank].read_text() for rank in shown) for texts in (outputs, errors)))


def wait_for_line(process, text, timeout_s=60):
    """Reads a process's output up to a line that holds `text`."""
    deadline = time.monotonic() + patience(timeout_s)
    seen = []
    while time.monotonic() < deadline:
        line = process.stdout.readline()
        if not line:
            break
        seen.append(line)
        if text in line:
            return line
    raise AssertionError(f"no line with '{text}' in {seen}; standard error: {process.stderr.read()}")


def children(pid):
    """The processes that `pid` started itself."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(child) for child in (task / "children").read_text().split()]
    return found


def write_text(folder, files=30, words_a_file=400):
    """Text files that are the same on every machine."""
    draw = random.Random(7)
    words = ["shard", "gather", "reduce", "rank", "step", "loss", "weight", "group", "mesh", "the"]
    for number in range(files):
        text = " ".join(draw.choice(words) for _ in range(words_a_file))
        (Path(folder) / f"part{number}.txt").write_text(text + "\n")


def run_training(ranks, data, *arguments):
    """Trains the tiny model."""
    options = [*TINY, "--data", data, *arguments]
    result = run([TRAIN, *options]) if ranks == 1 else run_ranks(ranks, TRAIN, "--ranks", ranks, *options)
    if result.returncode != 0:
        raise AssertionError(f"exit code {result.returncode}\n{result.stdout}\n{result.stderr}")
    return result


def train(ranks, data, *arguments):
    """Trains the tiny model and returns the run's record."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "record.json"
        run_training(ranks, data, "--json", record, *arguments)
        return json.loads(record.read_text())
