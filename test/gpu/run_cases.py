"""Runs cases in processes of their worlds, and starts new ones behind a case that ended them."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import shared_gpu
from limits import case_limit_s
from rank_files import read_lines, wait_for_all

HERE = Path(__file__).parent
START_LIMIT_S = 60
LEAST_S = 10  # for new processes behind a case that ended the others
BAD = ("raised", "wrong")


def environment(rank):
    more = {"OMP_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONFAULTHANDLER": "1",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    if "FSDP_BUILD_DIR" in os.environ:
        path = [str(Path(os.environ["FSDP_BUILD_DIR"]) / "bindings"), os.environ.get("PYTHONPATH", "")]
        more["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    return {**os.environ, **shared_gpu.environment(rank), **more}


def run_once(world, names, limit_s, tell):
    """The results of the cases that ended, by rank, and the last words of the processes. tell: gets each case's result of
    all ranks when it is there."""
    with tempfile.TemporaryDirectory(prefix="fsdp_gpu_") as folder:
        folder = Path(folder)
        outputs = [open(folder / f"{rank}.log", "w+") for rank in range(world.processes)]
        processes = [subprocess.Popen([sys.executable, str(HERE / "worker.py"), world.name, str(rank), str(folder),
                                       *names], stdout=output, stderr=output, env=environment(rank),
                                      stdin=subprocess.DEVNULL)
                     for rank, output in enumerate(outputs)]
        def read():
            return [{line["case"]: line for line in read_lines(folder / f"{rank}.jsonl")} for rank in range(world.processes)]

        def look():
            results = read()
            for name in names:
                if all(name in rank for rank in results):
                    tell(joined(name, results, ""))

        wait_for_all(processes, limit_s, look)
        results = read()
        words = []
        for rank, (process, output) in enumerate(zip(processes, outputs)):
            output.seek(0)
            words.append(f"rank {rank} ended with {process.returncode}:\n{output.read()[-4000:]}")
            output.close()
        return results, "\n".join(words)


def joined(name, results, words):
    """One result of a case from those of its ranks."""
    lines = [rank.get(name) for rank in results]
    bad = [line for line in lines if line and line["status"] in BAD]
    if bad:
        return {**bad[0], "status": "failed",
                "found": "\n".join(f"a rank: {line['found']}" for line in bad)}
    if any(line is None for line in lines):
        return {"case": name, "status": "failed", "found": f"did not end; {words}", "seconds": None}
    return lines[0]


def finished(names, results):
    """Those that every rank is through with, and the one behind them, unless the one before it has ended the ranks."""
    for at, name in enumerate(names):
        lines = [rank.get(name) for rank in results]
        ended_before = at > 0 and any(rank.get(names[at - 1], {}).get("status") in BAD for rank in results)
        if not all(lines):
            return names[:at] if ended_before else names[: at + 1]
    return list(names)


def has_ended(name, results):
    return all(name in rank for rank in results) or any(rank.get(name, {}).get("status") in BAD for rank in results)


class Told:
    """Each case's result, which is written once."""

    def __init__(self, write):
        self.write, self.results = write, {}

    def tell(self, line):
        if line["case"] not in self.results:
            self.results[line["case"]] = line
            self.write(line)

    def leave(self, names, why):
        for name in names:
            self.tell({"case": name, "status": "left", "found": why, "seconds": None})


def run_cases(world, names, limit_s, write=lambda line: None):
    """{name: result} with status passed, skipped, failed, or left, where time was up. write: called with each result once,
    when it is there."""
    told, left, end, least_s = Told(write), list(names), time.monotonic() + limit_s, 0
    while left:
        remaining = end - time.monotonic()
        if remaining <= least_s:
            told.leave(left, "no time was left")
            break
        least_s = LEAST_S
        results, words = run_once(world, left, min(remaining, START_LIMIT_S + case_limit_s() * len(left)), told.tell)
        is_over = time.monotonic() >= end
        for name in finished(left, results):
            if has_ended(name, results) or not is_over:
                told.tell(joined(name, results, words))
                left.remove(name)
        if is_over:
            told.leave(left[:1], "time was up in the middle of it")
            told.leave(left[1:], "no time was left")
            break
    return told.results
