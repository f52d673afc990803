"""A part of a stage: one command with a time limit and what it needs; and how it is run."""

import codecs
import json
import os
import re
import signal
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

COUNTS = re.compile(r"^(\d+) passed, (\d+) failed, (\d+) skipped$", re.MULTILINE)
TICK_S = 0.5
GRACE_S = 5
BEFORE_S = 15  # of its end a command is to end by itself, where it can
LEAST_S = 15  # with less time left nothing is begun


@dataclass(frozen=True)
class Part:
    """command: {out} in it is a file to which the command appends JSON lines as it goes, {limit} the seconds in which it is
    to end by itself. needs: as machine.Needs knows."""

    name: str
    command: tuple
    limit_s: float
    needs: tuple = ()
    environment: dict = field(default_factory=dict)
    shows: str = ""  # which claim


class Tail:
    """Takes what is new in a file of JSON lines."""

    def __init__(self, path, take):
        self.path, self.take, self.at = path, take, 0

    def look(self):
        if not self.path.exists():
            return
        data = self.path.read_bytes()[self.at:]
        whole = data[: data.rfind(b"\n") + 1]
        self.at += len(whole)
        for line in whole.decode(errors="replace").splitlines():
            try:
                self.take(json.loads(line))
            except json.JSONDecodeError:
                self.take({"text": line})


class Running:
    """The command in a process group of its own, whose output goes to the log as it comes."""

    def __init__(self, command, environment, log):
        self.process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                        stderr=subprocess.STDOUT, start_new_session=True)
        self.text, self.log = "", log
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self):
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        while data := os.read(self.process.stdout.fileno(), 1 << 16):
            text = decoder.decode(data)
            self.text = (self.text + text)[-200_000:]
            self.log(text)

    def has_ended(self, wait_s):
        try:
            self.process.wait(wait_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def end(self):
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, number)
            except ProcessLookupError:
                break
            if number == signal.SIGTERM:
                self.has_ended(GRACE_S)
        self.process.wait()

    def close(self):
        self.reader.join(GRACE_S)
        self.process.stdout.close()


def run(part, stage, record, environment, limit_s):
    """Runs it and writes down how it ended; returns the status."""
    record.log(stage, f"\n=== {stage}/{part.name}\n")
    record.add(stage, part=part.name, status="begun", limit_s=limit_s, shows=part.shows)
    begin, cpu_begin = time.monotonic(), children_cpu_s()
    with tempfile.TemporaryDirectory(prefix="fsdp_gpu_check_") as folder:
        out = Path(folder) / "out.jsonl"
        own = {"{out}": str(out), "{limit}": f"{max(5.0, limit_s - BEFORE_S):.0f}"}
        command = [own.get(word, word) for word in part.command]
        found = Tail(out, lambda line: record.add(stage, part=part.name, found=line))
        try:
            running = Running(command, {**environment, **part.environment}, lambda text: record.log(stage, text))
        except OSError as error:
            record.add(stage, part=part.name, status="failed", why=f"{command[0]}: {error.strerror}", seconds=0)
            return "failed"
        is_cut = False
        while not running.has_ended(TICK_S):
            found.look()
            if time.monotonic() - begin > limit_s:
                is_cut = True
                break
        running.end()  # also what the command has left running
        running.close()
        found.look()
    status, why = outcome(running, is_cut, limit_s)
    counts = COUNTS.findall(running.text)
    record.add(stage, part=part.name, status=status, **({"why": why} if why else {}),
               **({"counts": [int(number) for number in counts[-1]]} if counts else {}),
               seconds=round(time.monotonic() - begin, 1), cpu_seconds=round(children_cpu_s() - cpu_begin, 1))
    return status


def outcome(running, is_cut, limit_s):
    if is_cut:
        return "cut", f"not done within {limit_s:.0f} s"
    code = running.process.returncode
    if code == 0:
        return "passed", ""
    lines = [line.strip() for line in running.text.splitlines() if line.strip()]
    how = f"ended by signal {-code}" if code < 0 else f"exit code {code}"
    return "failed", f"{how}: {lines[-1][:300]}" if lines else how


def children_cpu_s():
    """Of commands that have ended, with all that they have waited for."""
    times = os.times()
    return times.children_user + times.children_system
