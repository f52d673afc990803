"""Sharded models train as the plain model does, on a GPU; skipped without one.

Usage: test_cases.py [--device cpu] [--world WORLD,...] [--out FILE] [--limit SECONDS] [-k PART] [--without PART,...]
--device cpu: the cases that need no GPU, on the CPU. --out: a JSON line for each case when it has ended, with what it
found. --limit: of each world. -k: only tests with this in their name. --without: none with one of these in it. The package
comes from FSDP_BUILD_DIR, else from where Python finds it.
"""

import argparse
import functools
import json
import os
import sys
import time
import unittest
from pathlib import Path

STARTED = time.monotonic()
HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "processes")]
if "FSDP_BUILD_DIR" in os.environ:
    sys.path.insert(0, str(Path(os.environ["FSDP_BUILD_DIR"]) / "bindings"))

import run_cases
from closing_line import main
from worlds import WORLDS, missing


def read_arguments():
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--device", choices=("cuda", "cpu"))
    parser.add_argument("--world", type=lambda text: text.split(","), default=list(WORLDS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--limit", type=float, default=800)
    parser.add_argument("-k", action="append", default=[])
    parser.add_argument("--without", type=lambda text: text.split(","), default=[])
    found, sys.argv[1:] = parser.parse_known_args()
    if not set(found.world) <= WORLDS.keys():
        parser.error(f"--world: expected some of {', '.join(WORLDS)}, with commas between, found {','.join(found.world)!r}")
    if found.device:
        os.environ["FSDP_TEST_DEVICE"] = found.device
    if found.out:
        found.out.write_text("")
    return found


ARGUMENTS = read_arguments()
SELECTED = {name: [] for name in WORLDS}  # cases


class Clock:
    since = STARTED  # the world's time begins, the first one's with this program


@functools.lru_cache(maxsize=None)
def results_of(world):
    """Of all cases of a world, when the first of them is asked for."""
    def write(line):
        if ARGUMENTS.out:
            with open(ARGUMENTS.out, "a") as out:
                out.write(json.dumps({"world": world, **line}) + "\n")

    left = ARGUMENTS.limit - (time.monotonic() - Clock.since)
    try:
        return run_cases.run_cases(WORLDS[world], SELECTED[world], left, write)
    finally:
        Clock.since = time.monotonic()


class OnGpu(unittest.TestCase):
    maxDiff = None

    def expect_passed(self, world, name):
        why = missing(WORLDS[world])
        if why:
            self.skipTest(why)
        result = results_of(world)[name]
        if result["status"] == "skipped":
            self.skipTest(result["found"])
        self.assertEqual(result["status"], "passed", result["found"])


def add_tests():
    from cases import CASES

    for world in ARGUMENTS.world:
        for name, case in CASES.items():
            chosen = ((not ARGUMENTS.k or any(part in f"test_{world}_{name}" for part in ARGUMENTS.k))
                      and not any(part in f"test_{world}_{name}" for part in ARGUMENTS.without))
            if world in case.worlds and chosen:
                SELECTED[world].append(name)
                setattr(OnGpu, f"test_{world}_{name}", functools.partialmethod(OnGpu.expect_passed, world, name))


add_tests()
if not any(SELECTED.values()):  # as it is to be where tools/test --filter asks for others
    print(f"no case of {', '.join(ARGUMENTS.world)} has {' or '.join(ARGUMENTS.k)} in its name")

if __name__ == "__main__":
    main()
