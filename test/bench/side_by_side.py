"""Runs the cases of test_benchmarks.py side by side, as tools/run_tests.py runs its tests, and closes with their counts."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tools")]

import run_tests
from run import BENCHMARKS
from test_programs import Cases

# What takes longest begins first: callgrind has one thread.
FIRST = ("compare_fsdp2", "host_overhead", "dtensor_step")
LIMIT_S = 1800  # with the build of what they need, which the others wait for


def case(name):
    test = {"name": name, "cmd": [sys.executable, str(Path(__file__).with_name("test_benchmarks.py"))], "env": {},
            "suite": ["bench"], "timeout": LIMIT_S, "is_parallel": True, "priority": int(name in FIRST)}
    return test, Cases(names=(f"test_{name}_runs",))


def main():
    outcomes = run_tests.Run([case(name) for name in sorted(BENCHMARKS)]).run()
    run_tests.say_what_failed(outcomes, Path(os.environ["FSDP_BUILD_DIR"]))
    passed, failed, skipped = run_tests.counts(outcomes)
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
