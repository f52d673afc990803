"""A part: one command with a time limit and what it needs; and how it is run."""

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
# Of a part's limit: what its end may take, and before that what a command may need that ends by itself.
END_PART, END_S = 0.08, 5
OWN_PART, OWN_S = 0.1, 8
LEAST_S = 15  # with less time left nothing is begun
BAD = ("failed", "wrong", "raised")
NAMED = 3  # cases, in one line
STOP = threading.Event()  # somebody ends this program: what runs is cut


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

    def end(self, grace_s):
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, number)
            except ProcessLookupError:
                break
            if number == signal.SIGTERM:
                self.has_ended(grace_s)
        self.process.wait()

    def close(self):
        self.reader.join(1)
        self.process.stdout.close()


def margins(limit_s):
    """(what the end of a part may take of its limit, what is left to a command that is to end by itself)."""
    end_s = min(END_S, END_PART * limit_s)
    return end_s, limit_s - end_s - min(OWN_S, OWN_PART * limit_s)


def run(part, stage, record, environment, limit_s):
    """Runs it and writes down how it ended, all within the limit; returns the status."""
    record.log(stage, f"\n=== {stage}/{part.name}\n")
    record.add(stage, part=part.name, status="begun", limit_s=limit_s, shows=part.shows)
    begin, lines = time.monotonic(), []
    end_s, own_s = margins(limit_s)

    def take(line):
        lines.append(line)
        record.add(stage, part=part.name, found=line)

    with tempfile.TemporaryDirectory(prefix="fsdp_gpu_check_") as folder:
        out = Path(folder) / "out.jsonl"
        own = {"{out}": str(out), "{limit}": f"{own_s:.0f}"}
        command = [own.get(word, word) for word in part.command]
        found = Tail(out, take)
        try:
            running = Running(command, {**environment, **part.environment}, lambda text: record.log(stage, text))
        except OSError as error:
            record.add(stage, part=part.name, status="failed", why=f"{command[0]}: {error.strerror}", seconds=0)
            return "failed"
        is_cut = False
        while not running.has_ended(TICK_S):
            found.look()
            if STOP.is_set() or time.monotonic() - begin > limit_s - end_s:
                is_cut = True
                break
        running.end(end_s)  # also what the command has left running
        running.close()
        found.look()
    counts = COUNTS.findall(running.text)
    counts = [int(number) for number in counts[-1]] if counts else None
    status, why = outcome(running, is_cut, limit_s, lines, counts)
    record.add(stage, part=part.name, status=status, **({"why": why} if why else {}), **({"counts": counts} if counts else {}),
               seconds=round(time.monotonic() - begin, 1))
    return status


def outcome(running, is_cut, limit_s, lines, counts):
    """(status, why). A case that no time was left for is no failure, and one that has failed is one also where time ran out."""
    failed = [line["case"] for line in lines if line.get("status") in BAD and "case" in line]
    left = [line["case"] for line in lines if line.get("status") == "left"]
    left += [line["left_out"] for line in lines if "left_out" in line and not line["left_out"].startswith("more turns")]
    if failed:
        return "failed", named("failed", failed) + (", and no time was left for all" if is_cut or left else "")
    code = running.process.returncode
    if is_cut:
        why = "the command was ended" if STOP.is_set() else f"not done within {limit_s:.0f} s"
        return "cut", why + (f"; {named('left', left)}" if left else "")
    if left:
        return "cut", named("left", left)
    if code != 0:
        last = [line.strip() for line in running.text.splitlines() if line.strip()]
        how = f"ended by signal {-code}" if code < 0 else f"exit code {code}"
        return "failed", f"{how}: {last[-1][:300]}" if last else how
    if counts and counts[0] == 0:
        reasons = [line["found"] for line in lines if line.get("status") == "skipped"]
        return "skipped", reasons[0] if reasons else "nothing of it runs here"
    return "passed", ""


def named(how, cases):
    more = f" and {len(cases) - NAMED} more" if len(cases) > NAMED else ""
    return f"{how}: {', '.join(cases[:NAMED])}{more}"
