"""Runs the cases of test_benchmarks.py and the tests of what the benchmarks compute side by side, as tools/run_tests.py runs
its tests, and closes with their counts.
"""

import argparse
import os
import sys
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools")]

import run_tests
import test_benchmarks
import test_selection
from test_programs import Cases

# What takes longest begins first: under callgrind.
FIRST = ("test_instructions_of_python_are_counted", "test_host_overhead_runs", "test_dtensor_step_runs")
LIMIT_S = 1800  # with the build of what they need, which the others wait for


def case(name):
    # With -u it is no fork of a process that has imported torch, which it does without.
    test = {"name": name, "cmd": [sys.executable, "-u", test_benchmarks.__file__], "env": {}, "suite": ["bench"],
            "timeout": LIMIT_S, "is_parallel": True, "priority": -FIRST.index(name) if name in FIRST else -len(FIRST)}
    return test, Cases(names=(name,))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-k", dest="text", default="", help="only the cases with this in their name")
    text = parser.parse_args().text

    build = Path(os.environ["FSDP_BUILD_DIR"])
    names = [name for name in unittest.defaultTestLoader.getTestCaseNames(test_benchmarks.Benchmarks) if text in name]
    tests = list(filter(test_selection.of_benchmarks, run_tests.tests_of(build)))
    computed = test_selection.with_text(tests, text) if text else test_selection.everything(tests)
    outcomes = run_tests.Run([*map(case, names), *computed]).run()
    run_tests.say_what_failed(outcomes, build)
    passed, failed, skipped = run_tests.counts(outcomes)
    if passed + failed + skipped == 0:
        print("nothing to run: no case of the benchmarks has that name", file=sys.stderr)
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return int(failed > 0 or passed + skipped == 0)


if __name__ == "__main__":
    sys.exit(main())
