"""Runs C++ tests whose ranks are processes: over NCCL on a GPU, over gloo with FSDP_TEST_DEVICE=cpu.

Usage: run_native.py [--processes N] [--program PATH] [--together] [--limit SECONDS] [--out FILE] [--nccl-log] [CASES]
CASES: as Catch2 takes them, all if nothing is said. Each process runs each case, as one rank. Those with the tag
[alone] get processes of their own; with --together none do. Where a case ends a process, new ones go on behind it. --program:
in FSDP_BUILD_DIR. --out: a JSON line for each case when it has ended, and for each figure that it told. --nccl-log: NCCL
says what it takes for collectives; lines of symmetric kernels are counted.
"""

import argparse
import functools
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "tools")]

import shared_gpu
import test_programs
from limits import case_limit_s
from rank_files import read_lines, wait_for_all

PROGRAM = "test/gpu/native/fsdp_test_gpu"
LAST_WORDS = 3000
LEAST_S = 5  # for new processes
NOT_AS_MANY = re.compile(r"skipped: \d+ ranks, where")
SYMMETRIC = re.compile(r"symm|Symk|CE AllGather|copy engine", re.IGNORECASE)


def read_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--program", default=PROGRAM)
    parser.add_argument("--together", action="store_true")
    parser.add_argument("--limit", type=float, default=170)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--nccl-log", action="store_true")
    parser.add_argument("cases", nargs="?", default="")
    return parser.parse_args()


class Program:
    def __init__(self, options):
        self.options = options
        self.path = Path(os.environ["FSDP_BUILD_DIR"]) / options.program
        # The same for all ranks, which would draw different models. What fails says it.
        self.seed = os.environ.get("FSDP_TEST_SEED") or str(random.randrange(1 << 32))
        self.devices = shared_gpu.gpus()

    def names(self, cases, tag=""):
        """Exclusions are of all that are not hidden. A comma stands between alternatives."""
        chosen = ",".join(f"~[.]{some}{tag}" for some in cases.split(","))
        done = subprocess.run([self.path, "--list-test-names-only", chosen], capture_output=True, text=True)
        return [line for line in done.stdout.splitlines() if line.strip() and line not in threads_only()]

    def environment(self, rank, folder):
        found = {**os.environ, **shared_gpu.environment(rank), "FSDP_TEST_DEVICE": os.environ.get("FSDP_TEST_DEVICE", "cuda"),
                 "FSDP_TEST_RANK": str(rank),
                 "FSDP_TEST_RANKS": str(self.options.processes), "FSDP_TEST_STORE": str(folder / "store"),
                 "FSDP_TEST_FIGURES": str(folder / "figures"), "FSDP_TEST_SEED": self.seed, "OMP_NUM_THREADS": "1"}
        if len(self.devices) > 1:
            found["CUDA_VISIBLE_DEVICES"] = self.devices[rank % len(self.devices)]
        if self.options.nccl_log:
            found |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,COLL,TUNING",
                      "NCCL_DEBUG_FILE": str(folder / f"nccl.{rank}")}
        return found

    def run(self, names, limit_s, tell):
        """{case: (status, text)} of those that ended, how many processes failed, and their last words."""
        with tempfile.TemporaryDirectory(prefix="fsdp_native_") as folder:
            folder = Path(folder)
            # A comma would end a name.
            (folder / "names").write_text("".join(name.replace(",", "\\,") + "\n" for name in names))
            processes, outputs = [], []
            for rank in range(self.options.processes):
                outputs.append(open(folder / f"{rank}.log", "w+"))
                processes.append(subprocess.Popen(
                    [self.path, "--input-file", folder / "names", "--reporter", "xml", "--out", folder / f"{rank}.xml"],
                    env=self.environment(rank, folder), stdout=outputs[-1], stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL))

            def ended():
                return joined([test_programs.read_cases(folder / f"{rank}.xml")[0]
                               for rank in range(self.options.processes)])

            def look():
                for one in ended().items():
                    tell(*one)
                return len(ended())

            wait_for_all(processes, limit_s, look, case_limit_s(usual=limit_s))
            found = ended()
            for line in read_lines(folder / "figures"):
                tell(None, line)
            if self.options.nccl_log:
                tell(None, self.nccl_lines(folder))
            words = []
            for rank, output in enumerate(outputs):
                output.seek(0)
                words.append(f"rank {rank} ended with {processes[rank].returncode}:\n{output.read()[-LAST_WORDS:]}")
                output.close()
            return found, [process.returncode for process in processes], "\n".join(words)

    def nccl_lines(self, folder):
        lines = [line for path in sorted(folder.glob("nccl.*")) for line in path.read_text(errors="replace").splitlines()]
        chosen = [line for line in lines if SYMMETRIC.search(line)]
        print("\n".join(chosen[:40]), flush=True)
        return {"figure": "lines of NCCL's log", "all": len(lines), "symmetric": len(chosen)}


@functools.lru_cache
def threads_only():
    lines = (HERE / "threads_only.txt").read_text().splitlines()
    return {line.rsplit(": ", 1)[0] for line in lines if not line.startswith("#")}


def joined(ranks):
    """{case: (status, text)} of the cases that all ranks have ended, or one has failed."""
    by_rank = [{case.get("name"): case for case in cases} for cases in ranks]
    found = {}
    for name in dict.fromkeys(name for cases in by_rank for name in cases):
        mine = [cases[name] for cases in by_rank if name in cases]
        failed = [case for case in mine if case.find("OverallResult").get("success") != "true"]
        # A part of it did not run, so what the test makes of that says nothing.
        partial = [warning.text.strip() for case in mine for warning in case.iter("Warning")
                   if NOT_AS_MANY.search(warning.text or "")]
        if partial:
            found[name] = ("skipped", partial[0])
        elif failed:
            found[name] = ("failed", "".join(map(test_programs.describe, failed)))
        elif len(mine) == len(ranks):
            why = [warning.text.strip() for case in mine for warning in case.iter("Warning")
                   if (warning.text or "").strip().startswith("skipped: ")]
            found[name] = ("skipped", why[0]) if why else ("passed", "")
    return found


class Outcomes:
    """Tells each case once, as it ends."""

    def __init__(self, out):
        self.out, self.statuses = out, {}

    def tell(self, name, result):
        if name is None:
            return self.write(result)
        if name in self.statuses:
            return None
        status, text = result
        self.statuses[name] = status
        print(f"{status}: {name}" + (f"\n{text}" if text else ""), flush=True)
        return self.write({"case": name, "status": status, "found": text[:2000]})

    def leave(self, names, why):
        for name in names:
            self.tell(name, ("left", why))

    def write(self, line):
        if self.out:
            with open(self.out, "a") as out:
                out.write(json.dumps(line) + "\n")


def run_all(program, names, end, outcomes, may_die):
    """may_die: of their processes some end by themselves, and have no result."""
    left, least_s = list(names), 0
    while left:
        remaining = end - time.monotonic()
        if remaining <= least_s:
            outcomes.leave(left, "no time was left")
            return
        least_s = LEAST_S
        found, codes, words = program.run(left, remaining, outcomes.tell)
        if may_die and codes[0] == 0 and not any(found.values()):
            found = {name: ("passed", "") for name in left}
        for name, result in found.items():
            outcomes.tell(name, result)
        behind = [name for name in left if name not in found]
        if behind and time.monotonic() >= end:
            outcomes.leave(behind[:1], "time was up in the middle of it")
            outcomes.leave(behind[1:], "no time was left")
            return
        if behind:  # in the order of the program: the first of them ended it
            outcomes.tell(behind[0], ("failed", f"did not end; {words}"))
        left = behind[1:]


def main():
    options = read_arguments()
    program = Program(options)
    if not program.path.exists():
        print(f"run_native: {program.path} is not built")
        return 1
    if os.environ.get("FSDP_TEST_DEVICE", "cuda") == "cuda" and not program.devices:
        print("run_native: no GPU; FSDP_TEST_DEVICE=cpu runs what needs none\n0 passed, 0 failed, 0 skipped")
        return 1
    outcomes, end = Outcomes(options.out), time.monotonic() + options.limit
    names = program.names(options.cases)
    dying = set(program.names(options.cases, "[dies]"))
    alone = set() if options.together else set(program.names(options.cases, "[alone]"))
    run_all(program, [name for name in names if name not in alone], end, outcomes, may_die=False)
    for name in names:
        if name in alone:
            run_all(program, [name], end, outcomes, may_die=name in dying)
    if "failed" in outcomes.statuses.values():
        print(f"FSDP_TEST_SEED={program.seed} draws the same again")
    counts = {status: list(outcomes.statuses.values()).count(status) for status in ("passed", "failed", "skipped", "left")}
    print("{passed} passed, {0} failed, {skipped} skipped".format(counts["failed"] + counts["left"], **counts), flush=True)
    return 1 if counts["failed"] or counts["left"] or not names else 0


if __name__ == "__main__":
    sys.exit(main())
