"""Faults of a network under ranks that train, and what is promised then: each rank goes on with the results that it would have
had, or ends in time with one readable error that names operation, group and a peer; every checkpoint is whole; no process is
left.

    FSDP_BUILD_DIR=build python3 test/processes/cluster_faults.py --first 1 --count 200 --record FILE.jsonl
"""

import argparse
import dataclasses
import datetime
import functools
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import launch
from cluster_case import cluster

RATE = "100mbit"
SLOWER = 100  # times
# What a rank may take beyond its timeout: the store's answer (5 s), the others' reports (2 s), and to end.
LAST_WORDS_S = 12
STEPS = 12
OPERATION = re.compile(r"all_gather|reduce_scatter|all_reduce|broadcast|barrier")
GROUP = re.compile(r"group '[^']+'")
RANKS = re.compile(r"\branks? (\d[\d, -]*)")
# What only whoever wrote the code can read.
UNREADABLE = re.compile(r"terminate called|Traceback|Exception raised from|frame #\d|\.cpp:\d|\.cc:\d|0x[0-9a-f]{8}")


@dataclasses.dataclass
class Fault:
    kind: str
    victims: list
    lasts_s: float = None  # None: until all ranks have ended

    def begin(self, run):
        self.change(run, cut=run.network.cut, part=run.network.part, number=signal.SIGSTOP,
                    bits=run.network.rate / SLOWER)

    def end(self, run):
        self.change(run, cut=run.network.mend, part=run.network.join, number=signal.SIGCONT, bits=run.network.rate)

    def change(self, run, cut, part, number, bits):
        if self.kind == "cut":
            cut(*self.victims)
        elif self.kind == "part":
            part(*self.victims)
        elif self.kind == "slow":
            run.network.set_rate(bits, *self.victims)
        else:
            for rank in self.victims:
                run.processes[rank].send_signal(number)


class Run:
    """Ranks that train over a cluster."""

    def __init__(self, network, folder, timeout_s, **settings):
        self.network = network
        self.timeout_s = timeout_s
        self.folder = Path(folder)
        self.saves = self.folder / "saves"
        settings = {"steps": STEPS, "timeout_ms": round(timeout_s * 1000), "save_into": self.saves, **settings}
        self.processes = []
        for rank in network.ranks:
            with self.output(rank).open("w") as output, self.log(rank).open("w") as log:
                self.processes.append(network.start(
                    rank, [launch.RANK_PROGRAMS, "network_faults", *(f"{name}={value}" for name, value in settings.items())],
                    stdin=subprocess.PIPE, stdout=output, stderr=log, text=True, env=launch.environment()))
        self.ended_at = {}

    def output(self, rank):
        return self.folder / f"rank{rank}"

    def log(self, rank):
        """What the library and c10d say besides; c10d's lines hold frames of its stack."""
        return self.folder / f"rank{rank}.log"

    def await_line(self, line, ranks=None):
        deadline = time.monotonic() + launch.patience(60)
        for rank in self.network.ranks if ranks is None else ranks:
            while f"{line}\n" not in self.output(rank).read_text():
                if time.monotonic() > deadline or self.processes[rank].poll() is not None:
                    raise AssertionError(f"rank {rank} has not come to '{line}': {self.output(rank).read_text()}")
                time.sleep(0.002)

    def go_on(self):
        for process in self.processes:
            process.stdin.write("\n")
            process.stdin.flush()

    def look(self):
        """True if all have ended."""
        for rank, process in enumerate(self.processes):
            if process.poll() is not None:
                self.ended_at.setdefault(rank, time.monotonic())
        return len(self.ended_at) == len(self.processes)

    def await_end(self, deadline):
        while not self.look() and time.monotonic() < deadline:
            time.sleep(0.02)

    def meet(self, fault):
        """Begins the fault, ends it after its time, and waits for the ranks as long as they may take."""
        fault.begin(self)
        begin = time.monotonic()
        over = begin + (fault.lasts_s or 0)
        self.await_end(over)
        if fault.lasts_s is not None:
            fault.end(self)
        self.await_end(over + self.timeout_s + launch.patience(LAST_WORDS_S))
        self.longest_s = round(max(self.ended_at.values(), default=time.monotonic()) - begin, 1)
        return self

    def close(self):
        for process in self.processes:
            process.kill()
            process.wait()
            process.stdin.close()


class Said:
    """What one rank has said of its end."""

    def __init__(self, run, rank):
        text = run.output(rank).read_text()
        self.rank = rank
        self.code = run.processes[rank].returncode
        self.result = "".join(re.findall(r"^result (\w+)$", text, re.MULTILINE))
        begin = re.search(r"^(failed|schedule): ", text, re.MULTILINE)
        self.errors = len(re.findall(r"^(?:failed|schedule): ", text, re.MULTILINE))
        self.error = text[begin.start():].rstrip() if begin else ""
        self.text = f"{text}{run.log(rank).read_text()}"

    def broken_promises(self, expected):
        if self.code == 0:
            return [] if self.result == expected else [f"result {self.result}, expected {expected}"]
        if self.code is None:
            return ["still runs"]
        broken = [] if self.errors == 1 and self.code in (1, 3) else [f"code {self.code}, {self.errors} errors"]
        if not OPERATION.search(self.error):
            broken.append("names no operation")
        # A schedule's error is about the model, whose group it leaves out.
        if not GROUP.search(self.error) and not self.error.startswith("schedule: "):
            broken.append("names no group")
        named = {int(rank) for ranks in RANKS.findall(self.error) for rank in re.findall(r"\d+", ranks)}
        if named <= {self.rank}:
            broken.append("names no peer")
        if UNREADABLE.search(self.error):
            broken.append(f"'{UNREADABLE.search(self.error)[0]}' in the error")
        return broken


def checkpoints(folder):
    """By name: a hash of the values of each checkpoint that is there. Raises where one is not whole."""
    if not folder.exists():
        return {}
    result = launch.run([launch.RANK_PROGRAMS, "network_faults", f"show={folder}"])
    if result.returncode != 0:
        raise AssertionError(f"a checkpoint is not whole: {result.stdout}{result.stderr}")
    return dict(line.split() for line in result.stdout.splitlines())


@functools.cache
def undisturbed(ranks):
    """The results of the ranks, and the checkpoints. Settings that only say what is checked or kept change neither."""
    with tempfile.TemporaryDirectory() as folder, cluster.Cluster(ranks) as network:
        run = Run(network, folder, launch.patience(60))
        try:
            run.await_end(time.monotonic() + launch.patience(120))
            said = [Said(run, rank) for rank in network.ranks]
        finally:
            run.close()
        if any(each.code != 0 for each in said):
            raise AssertionError("\n".join(each.text for each in said))
        return [each.result for each in said], checkpoints(run.saves)


def processes_left(network):
    return [int(process) for name in network.names for process in cluster.run("ip", "netns", "pids", name).split()]


def judge(run):
    """What each rank has said, and the promises that are broken."""
    results, saved = undisturbed(len(run.processes))
    said = [Said(run, rank) for rank in run.network.ranks]
    broken = [f"rank {each.rank}: {promise}"
              for each, expected in zip(said, results) for promise in each.broken_promises(expected)]
    if all(each.code is not None for each in said) and processes_left(run.network):
        broken.append(f"processes {processes_left(run.network)} are left")
    try:
        found = checkpoints(run.saves)
        broken += [f"checkpoint {name} has other values" for name, value in found.items() if saved.get(name) != value]
    except AssertionError as error:
        broken.append(str(error))
    names = [path.name for path in run.saves.iterdir()] if run.saves.exists() else []
    broken += [f"{name} is left of a save" for name in names if name.startswith(".")]
    return said, broken


@dataclasses.dataclass
class Draw:
    """A random fault."""

    seed: int
    ranks: int
    compare_every: int
    fault: Fault
    step: int
    delay_s: float
    is_short: bool


def draw(seed, timeout_s):
    dice = random.Random(seed)
    ranks = dice.choice([2, 3, 4])
    kind = dice.choice(["cut", "slow", "stop", "part"])
    victims = sorted(dice.sample(range(ranks), 1 if kind in ("cut", "stop") else dice.randint(1, ranks - 1)))
    is_short = dice.random() < 0.5
    # TCP sends again after twice the time that it has waited so far.
    lasts_s = dice.uniform(0.1, timeout_s / 5) if is_short else dice.choice([None, timeout_s * dice.uniform(1.2, 2)])
    if kind in ("slow", "stop") and lasts_s is None:
        lasts_s = timeout_s * 1.5
    return Draw(seed=seed, ranks=ranks, compare_every=int(dice.random() < 0.3), fault=Fault(kind, victims, lasts_s),
                step=dice.randint(1, STEPS - 1), delay_s=dice.uniform(0, 0.2), is_short=is_short)


def run_draw(drawn, timeout_s):
    """What the record says of it."""
    with tempfile.TemporaryDirectory() as folder, cluster.Cluster(drawn.ranks, RATE) as network:
        run = Run(network, folder, timeout_s, compare_every=drawn.compare_every)
        try:
            run.await_line(f"step {drawn.step}", ranks=[drawn.fault.victims[0]])
            time.sleep(drawn.delay_s)
            run.meet(drawn.fault)
            said, broken = judge(run)
        finally:
            run.close()
    if drawn.is_short and drawn.fault.kind != "slow":
        broken += [f"rank {each.rank}: ended, though the fault was short" for each in said if each.code]
    return {"seed": drawn.seed, "ranks": drawn.ranks, "fault": drawn.fault.kind, "victims": drawn.fault.victims,
            "lasts_s": drawn.fault.lasts_s and round(drawn.fault.lasts_s, 2), "step": drawn.step,
            "delay_s": round(drawn.delay_s, 3), "compare_every": drawn.compare_every, "timeout_s": timeout_s,
            "codes": [each.code for each in said], "said": [each.error.split("\n")[0] for each in said],
            "ended_after_s": run.longest_s, "broken": broken}, said


def main():
    parser = argparse.ArgumentParser(description="Random faults of a network, one record a line.")
    parser.add_argument("--first", type=int, default=1, help="seed [1]")
    parser.add_argument("--count", type=int, default=10, help="of faults, with one seed after the other [10]")
    parser.add_argument("--timeout", type=float, default=launch.patience(4),
                        help="of the ranks, in seconds [4 on an idle machine]")
    parser.add_argument("--record", type=Path, help="a file that lines are added to")
    given = parser.parse_args()
    commit = subprocess.run(["git", "-C", launch.ROOT, "rev-parse", "--short=12", "HEAD"], check=True, text=True,
                            capture_output=True).stdout.strip()
    failed = 0
    for seed in range(given.first, given.first + given.count):
        record, said = run_draw(draw(seed, given.timeout), given.timeout)
        failed += bool(record["broken"])
        line = json.dumps({"test": "network_faults", **record, "commit": commit,
                           "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")})
        print(line, flush=True)
        if record["broken"]:
            for each in said:
                print(f"--- rank {each.rank}, code {each.code}\n{each.text}", file=sys.stderr, flush=True)
        if given.record:
            with given.record.open("a") as file:
                file.write(line + "\n")
    print(f"{given.count - failed} passed, {failed} failed, 0 skipped")
    return bool(failed)


if __name__ == "__main__":
    cluster.end_on_signals()
    sys.exit(main())
