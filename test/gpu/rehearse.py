#!/usr/bin/env python3
"""Rehearses tools/gpu_check as it will run on a machine with a GPU, without a network and a compiler, on what a CPU can do.

Usage: rehearse.py [--packed DIR] [--folder DIR] [--jobs N] [--keep]
It packs with tools/gpu_check --pack, which makes an environment with torch 2.11.0 (a download of 3 GB, the first time) and
builds, and copies the working tree and what was packed into an empty folder. From there alone it runs a first call that is cut
short, then the two commands. It needs root, to hide this machine's network, Debian packages and CUDA toolkit. Budgets are as
many times longer as this machine has fewer cores than 16. test_gpu_pack.py is the same in short.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools" / "gpu"))

import bare_machine  # noqa: E402
import pack  # noqa: E402
import plan  # noqa: E402
from call import ALL_PASSED, SOME_FAILED, SOME_SKIPPED, TIME_IS_UP  # noqa: E402
from record import Record  # noqa: E402
from report import ends_of  # noqa: E402

CORES = 16  # of the machine that this is for
CUT_S = 60
# What is left of a budget's end: a part that is cut, the report, and Python's own end.
TOLERANCE_S = 5
# What a CPU cannot do at all; of all else some has to pass.
NEEDS_A_GPU = {"waits_one", "waits_fake", "graphs_one", "graphs_fake", "graphs_nccl", "peak_one", "peak_fake", "peak_nccl",
               "memcheck", "compiled"}


def read_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    folder = ROOT / ".cache" / "gpu_rehearsal"
    parser.add_argument("--packed", type=Path, help="what tools/gpu_check --pack has filled; made where nothing is said")
    parser.add_argument("--folder", type=Path, default=folder, help="machine/ in it is emptied first")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(),
                        help="cores that the budgets are scaled by (this machine's)")
    parser.add_argument("--keep", action="store_true", help="leave the folder")
    return parser.parse_args()


def wrong_parts(record):
    found = []
    for name in plan.NAMES:
        for part, line in ends_of(name, record).items():
            if line["status"] in ("failed", "cut", "left"):
                found.append(f"{name}/{part}: {line['status']}: {line.get('why', '')}")
            elif line["status"] == "skipped" and part not in NEEDS_A_GPU:
                found.append(f"{name}/{part}: skipped, and needs no GPU: {line.get('why', '')}")
    return found


def one_command(machine, name, arguments, budget_s, codes):
    """What is wrong with how it ended, in words."""
    begin = time.monotonic()
    code = bare_machine.call(machine, pack.VENV / "bin" / "python3", [name, "--device", "cpu", *arguments])
    taken = time.monotonic() - begin
    print(f"rehearse: {name} took {taken:.0f} s of {budget_s:.0f} s", flush=True)
    found = [] if code in codes else [f"{name} ended with exit code {code}, and not with {' or '.join(map(str, codes))}"]
    return found + ([f"{name} took {taken:.0f} s of its {budget_s:.0f} s"] if taken > budget_s + TOLERANCE_S else [])


def main():
    options = read_arguments()
    packed, machine = options.packed or options.folder / "packed", options.folder / "machine"
    if not options.packed:
        subprocess.run([sys.executable, ROOT / "tools" / "gpu_check", "--pack", packed], check=True)
    if not bare_machine.can_unshare():
        raise SystemExit("rehearse: needs root, for a namespace without a network")
    print(f"rehearse: {bare_machine.make(machine.resolve(), packed.resolve()):,} bytes travel", flush=True)
    slower = max(1, CORES / options.jobs)
    machine, slow = machine.resolve(), ("--slower", slower)
    found = one_command(machine, "first", (*slow, "--seconds", CUT_S), CUT_S, (TIME_IS_UP,))
    results = machine / "repository" / ".cache" / "gpu_check" / "cpu"
    for name, budget_s in plan.BUDGETS_S.items():
        found += one_command(machine, name, slow, budget_s * slower, (ALL_PASSED, SOME_SKIPPED))
    record = Record(results)
    found += wrong_parts(record)
    ends = [line for name in plan.NAMES for line in ends_of(name, record).values()]
    counts = [sum(line["status"] == status for line in ends) for status in ("passed", "skipped")]
    report = results / "report.md"
    if report.exists():
        shutil.copy(report, options.folder / "report.md")
    for text in found:
        print(f"wrong: {text}")
    print(f"{counts[0]} passed, {len(found)} failed, {counts[1]} skipped", flush=True)
    if not options.keep and not found:
        shutil.rmtree(machine)
    return SOME_FAILED if found else ALL_PASSED


if __name__ == "__main__":
    sys.exit(main())
