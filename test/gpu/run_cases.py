"""Runs cases in processes of their worlds, and starts new ones behind a case that ended them."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from worker import CASE_LIMIT_S

HERE = Path(__file__).parent
START_LIMIT_S = 60
BAD = ("raised", "wrong")
GRACE_S = 5  # for the other ranks, once one has ended


def environment():
    more = {"OMP_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONFAULTHANDLER": "1",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    if "FSDP_BUILD_DIR" in os.environ:
        path = [str(Path(os.environ["FSDP_BUILD_DIR"]) / "bindings"), os.environ.get("PYTHONPATH", "")]
        more["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    return {**os.environ, **more}


def wait_for_all(processes, limit_s):
    """Ends those that are left when time is up, or some time after one has failed."""
    end, has_failed = time.monotonic() + limit_s, False
    while any(process.poll() is None for process in processes) and time.monotonic() < end:
        if not has_failed and any(process.poll() not in (None, 0) for process in processes):
            has_failed, end = True, min(end, time.monotonic() + GRACE_S)
        time.sleep(0.1)
    for process in processes:
        process.kill()
        process.wait()


def read_lines(path):
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def run_once(world, names, limit_s):
    """The results of the cases that ended, by rank, and the last words of the processes."""
    with tempfile.TemporaryDirectory(prefix="fsdp_gpu_") as folder:
        folder = Path(folder)
        outputs = [open(folder / f"{rank}.log", "w+") for rank in range(world.processes)]
        processes = [subprocess.Popen([sys.executable, str(HERE / "worker.py"), world.name, str(rank), str(folder),
                                       *names], stdout=output, stderr=output, env=environment(),
                                      stdin=subprocess.DEVNULL)
                     for rank, output in enumerate(outputs)]
        wait_for_all(processes, limit_s)
        results = [{line["case"]: line for line in read_lines(folder / f"{rank}.jsonl")}
                   for rank in range(world.processes)]
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


def run_cases(world, names, limit_s):
    """{name: result} with status passed, skipped or failed."""
    done, left = {}, list(names)
    end = time.monotonic() + limit_s
    while left:
        remaining = end - time.monotonic()
        if remaining <= 10:
            done |= {name: {"case": name, "status": "failed", "found": "no time was left", "seconds": None}
                     for name in left}
            break
        results, words = run_once(world, left, min(remaining, START_LIMIT_S + CASE_LIMIT_S * len(left)))
        for name in finished(left, results):
            done[name] = joined(name, results, words)
            left.remove(name)
    return done
