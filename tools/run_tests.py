"""Runs the tests of a build folder side by side and counts test cases, not programs. Closes with what failed, in one
place, and the counts.
"""

import argparse
import json
import os
import re
import sys
import threading
import time
import traceback
from pathlib import Path

import test_selection
from test_forks import Forks
from test_programs import Outcome, is_python, run_test, suite_of
from test_slots import Slots

ROOT = Path(__file__).resolve().parents[1]
# What Meson's time limits are made for.
USUAL_DRAWS = 200
# A limit is there to end what hangs. Beside others a test takes longer.
BESIDE_OTHERS = 3
LAST_LINES = 40
SEED = re.compile(r"\b\w*SEED=\d+|\bseeds? \[?\d+[\d, ]*\]?")
# Under sanitizers a model takes five times as long, and what they look for shows in few; .ci/weekly draws more.
SANITIZED_DRAWS = 50
# What the address sanitizer watches: the library, under the programs that use nothing of Python's.
SANITIZED_SUITES = ("comm", "tensor", "dtensor", "group", "late_device", "runtime", "property", "checkpoint")


class Run:
    """Tests that run beside each other, each in a thread that waits for its program."""

    def __init__(self, chosen):
        # Meson's priorities are for what takes longest. One that is not parallel runs when all others have ended.
        self.waiting = sorted(chosen, key=lambda one: (not one[0]["is_parallel"], -one[0]["priority"]))
        pythons = [test["cmd"][0] for test, _ in chosen if is_python(test)]
        self.forks = Forks(pythons[0]) if pythons else None
        self.slots = Slots()
        self.running = 0
        self.changed = threading.Condition()
        self.outcomes = []  # (test, its outcome), as they ended

    def run(self):
        threads = []
        while self.waiting:
            test, cases = self.waiting[0]
            with self.changed:
                while not self.may_start(test):
                    self.changed.wait(0.1)
                self.running += 1
            self.waiting.pop(0)
            threads.append(threading.Thread(target=self.run_one, args=(test, cases)))
            threads[-1].start()
            if not test["is_parallel"]:
                threads[-1].join()
        for thread in threads:
            thread.join()
        if self.forks:
            self.forks.close()
        return self.outcomes

    def may_start(self, test):
        return self.running == 0 if not test["is_parallel"] else self.slots.may_start(self.running)

    def run_one(self, test, cases):
        begin = time.monotonic()
        try:
            outcome = run_test(test, cases, self.forks)
        except Exception:  # a fault of ours: the run goes on, and fails
            outcome = Outcome(failed=1, report=traceback.format_exc(), repeat="tools/test --failed")
        with self.changed:
            self.running -= 1
            self.outcomes.append((test, outcome))
            if outcome.passed + outcome.failed + outcome.skipped > 0:
                print(f"{test['name']}: {outcome.passed} passed, {outcome.failed} failed, {outcome.skipped} skipped "
                      f"({time.monotonic() - begin:.1f} s, {outcome.cpu_s:.1f} s of a processor)", flush=True)
            self.changed.notify()


def say_what_failed(outcomes, build):
    """Each failure with its seed, the command that repeats it and its last lines; all of its output goes to a file."""
    logs = build / "test-logs"
    for test, outcome in outcomes:
        if not outcome.failed:
            continue
        logs.mkdir(exist_ok=True)
        log = logs / f"{test['name']}.log"
        log.write_text(outcome.report)
        print(f"\n=== failed: {test['name']}: {', '.join(outcome.failed_cases) or 'the program'}")
        seeds = dict.fromkeys(SEED.findall(outcome.report))
        if seeds:
            print(f"seed: {', '.join(seeds)}")
        print(f"repeat: {outcome.repeat}\nall of its output: {log}; the last lines:")
        print("\n".join(outcome.report.rstrip().splitlines()[-LAST_LINES:]), flush=True)


def counts(outcomes):
    """(passed, failed, skipped)"""
    return [sum(getattr(outcome, what) for _, outcome in outcomes) for what in ("passed", "failed", "skipped")]


def sanitize(tests, library, preload):
    """The same programs over a library that was built with sanitizers; the tests that are run so."""
    chosen = [test for test in tests if suite_of(test) in SANITIZED_SUITES and
              Path(test["cmd"][0]).name.startswith("fsdp_test") and "FSDP_SANITIZE" not in test["env"]]
    for test in chosen:
        test["env"] = {**test["env"], "LD_LIBRARY_PATH": str(library), "LD_PRELOAD": preload, "FSDP_TEST_SANITIZED": "1"}
        if "FSDP_DRAWS" not in os.environ:
            test["env"]["FSDP_DRAWS"] = str(SANITIZED_DRAWS)
        test["timeout"] *= 3
    return chosen


def tests_of(build):
    """All that Meson knows, with limits for a run side by side."""
    tests = json.loads((build / "meson-info" / "intro-tests.json").read_text())
    more_draws = max(1, int(os.environ.get("FSDP_DRAWS", USUAL_DRAWS)) / USUAL_DRAWS)
    more_combinations = 3 if os.environ.get("FSDP_TEST_THOROUGH") else 1
    for test in tests:
        test["timeout"] *= max(more_draws, more_combinations) * BESIDE_OTHERS
    return tests


def choose(tests, options):
    if options.failed:
        return test_selection.failed_before(tests, options.build)
    if options.changed:
        return test_selection.reached_by(tests, test_selection.changed_files(ROOT, options.changed))
    if options.filter:
        return test_selection.with_text(tests, options.filter)
    return test_selection.everything(tests)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("build", type=Path, help="the build folder")
    parser.add_argument("--filter", help="only test cases with this in their name, or with this [tag]")
    parser.add_argument("--failed", action="store_true", help="only what failed the last time")
    parser.add_argument("--changed", metavar="COMMIT", help="only what the files can reach that differ from COMMIT")
    parser.add_argument("--sanitized-library", type=Path, metavar="FOLDER", help="run over the library in this folder")
    parser.add_argument("--preload", metavar="LIBRARY", help="before the sanitized library")
    options = parser.parse_args()

    tests = tests_of(options.build)
    if options.sanitized_library:
        tests = sanitize(tests, options.sanitized_library, options.preload)
    chosen = choose(tests, options)
    left_out = [test["name"] for test, _ in chosen if test_selection.of_benchmarks(test)]
    if left_out and options.changed:
        print(f"left out: {', '.join(left_out)}, which `tools/test --suite benchmarks` builds and runs")
    outcomes = Run([one for one in chosen if not test_selection.of_benchmarks(one[0])]).run()
    say_what_failed(outcomes, options.build)
    test_selection.write_failed(options.build, {test["name"]: outcome.failed_cases
                                                for test, outcome in outcomes if outcome.failed})
    passed, failed, skipped = counts(outcomes)
    if passed + failed + skipped == 0:
        print("nothing to run: " + ("nothing failed the last time" if options.failed else
                                    "no test is reached" if options.changed else
                                    "no test case has that name; `tools/test --suite benchmarks` has more"),
              file=sys.stderr)
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    nothing_is_well = options.failed or options.changed
    return int(failed > 0 or (passed == 0 and not nothing_is_well))


if __name__ == "__main__":
    sys.exit(main())
