"""Runs the tests of a build folder and counts test cases, not programs.

Meson knows the tests. Programs are Catch2's and report each of their cases; Python modules close with the
line "N passed, N failed, N skipped".
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from pathlib import Path

CLOSING_LINE = re.compile(r"^(\d+) passed, (\d+) failed, (\d+) skipped$", re.MULTILINE)


class Outcome:
    def __init__(self, passed=0, failed=0, skipped=0, report=""):
        self.passed, self.failed, self.skipped, self.report = passed, failed, skipped, report


# What Meson's time limits are made for.
USUAL_DRAWS = 400


def has_gpu():
    return Path("/dev/nvidiactl").exists()


def run(command, test, timeout_s, **options):
    """(exit code, its output); the exit code is None after a timeout."""
    environment = {**os.environ, **test["env"]}
    process = subprocess.Popen(command, env=environment, text=True, errors="replace", stdin=subprocess.DEVNULL,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
                               **options)
    try:
        output, _ = process.communicate(timeout=timeout_s)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        # The whole session: a test may have started processes of its own.
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        return None, output


def how_it_ended(exit_code, timeout_s):
    if exit_code is None:
        return f"was ended after {timeout_s} s"
    if exit_code < 0:
        return f"was ended by {signal.Signals(-exit_code).name}"
    return f"ended with exit code {exit_code}"


def run_plain(test, arguments):
    """A test that is no Catch2 program."""
    exit_code, output = run(test["cmd"] + arguments, test, test["timeout"])
    counts = CLOSING_LINE.findall(output)
    if not counts:
        outcome = Outcome(passed=int(exit_code == 0), failed=int(exit_code != 0))
    else:
        outcome = Outcome(*map(int, counts[-1]))
        if exit_code != 0 and outcome.failed == 0:
            outcome.failed = 1
    if outcome.failed:
        outcome.report = f"{output}\n{test['name']} {how_it_ended(exit_code, test['timeout'])}\n"
    return outcome


def describe(case):
    """A failed test case of Catch2's XML as text."""
    lines = [f"{case.get('filename')}:{case.get('line')}: {case.get('name')}"]
    for element in case.iter():
        text = (element.text or "").strip()
        if element.tag == "Section":
            lines.append(f"  in section {element.get('name')}")
        elif element.tag == "Expression" and element.get("success") == "false":
            original = (element.findtext("Original") or "").strip()
            expanded = (element.findtext("Expanded") or "").strip()
            lines.append(f"  {element.get('filename')}:{element.get('line')}: "
                         f"{element.get('type')}( {original} )\n    with {expanded}")
        elif element.tag in ("Exception", "Failure", "FatalErrorCondition"):
            lines.append(f"  {element.get('filename')}:{element.get('line')}: {element.tag}: {text}")
        elif element.tag in ("Info", "Warning", "StdOut", "StdErr") and text:
            lines.append(f"  {element.tag.lower()}: {text}")
    return "\n".join(lines) + "\n"


def read_cases(path):
    """The finished test cases of a report, which ends early if the program did."""
    finished, open_name = [], None
    try:
        for event, element in ET.iterparse(path, events=("start", "end")):
            if element.tag == "TestCase":
                open_name = element.get("name") if event == "start" else None
                if event == "end":
                    finished.append(element)
    except (ET.ParseError, FileNotFoundError):
        pass
    return finished, open_name


def is_skipped(case):
    """True for a case that says why this machine cannot run it (test/support/skip.hpp), and found nothing wrong before."""
    return any((warning.text or "").strip().startswith("skipped: ") for warning in case.iter("Warning"))


def specification(text, with_gpu):
    """Catch2's words for the filter; commas separate alternatives."""
    # An exclusion alone selects hidden tests too, which are what other tests start in processes.
    excluded = "~[.]" if with_gpu else "~[.]~[gpu]"
    if not text:
        return [excluded]
    return [excluded + (text if text.startswith("[") else f"*{text}*")]


def count_gpu_cases(test, text):
    listed = specification(text, with_gpu=True)
    command = test["cmd"][:1] + ["--list-test-names-only", "[gpu]" + (listed[0] if listed else "")]
    _, output = run(command, test, 60)
    return sum(bool(line.strip()) for line in output.splitlines())


def run_catch2(test, text):
    with tempfile.TemporaryDirectory() as folder:
        report = os.path.join(folder, "report.xml")
        spec = specification(text, has_gpu())
        exit_code, output = run(test["cmd"] + ["--reporter", "xml", "--out", report] + spec, test,
                                test["timeout"])
        finished, open_name = read_cases(report)
    failed = [case for case in finished if case.find("OverallResult").get("success") != "true"]
    skipped = [case for case in finished if case not in failed and is_skipped(case)]
    outcome = Outcome(len(finished) - len(failed) - len(skipped), len(failed), len(skipped), "".join(map(describe, failed)))
    if failed and output:
        outcome.report += f"{test['name']} printed:\n{output}\n"
    # A crash, a timeout or a sanitizer's report, which no test case shows.
    if exit_code != 0 and (open_name or not failed):
        outcome.failed += 1
        outcome.report += f"{output}\n{test['name']} {how_it_ended(exit_code, test['timeout'])}"
        outcome.report += f" in: {open_name}\n" if open_name else "\n"
    if not has_gpu():
        outcome.skipped += count_gpu_cases(test, text)
    return outcome


def is_catch2(test):
    """True for a program of ours that the build made."""
    with open(test["cmd"][0], "rb") as program:
        return program.read(4) == b"\x7fELF" and "python" not in os.path.basename(test["cmd"][0])


def run_all(tests, text):
    total = Outcome()
    for test in tests:
        begin = time.monotonic()
        if not os.path.exists(test["cmd"][0]):
            outcome = Outcome(failed=1, report=f"{test['name']}: {test['cmd'][0]} has not been built")
        elif is_catch2(test):
            outcome = run_catch2(test, text)
        else:
            outcome = run_plain(test, ["-k", text.replace(" ", "_")] if text else [])
        if outcome.passed + outcome.failed + outcome.skipped > 0:
            print(f"{test['name']}: {outcome.passed} passed, {outcome.failed} failed, "
                  f"{outcome.skipped} skipped ({time.monotonic() - begin:.1f} s)", flush=True)
        if outcome.report:
            print(outcome.report, flush=True)
        total.passed += outcome.passed
        total.failed += outcome.failed
        total.skipped += outcome.skipped
    return total


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("build", type=Path, help="the build folder")
    parser.add_argument("--filter", help="only test cases with this in their name, or with this [tag]")
    options = parser.parse_args()

    tests = json.loads((options.build / "meson-info" / "intro-tests.json").read_text())
    more_draws = max(1, int(os.environ.get("FSDP_DRAWS", USUAL_DRAWS)) / USUAL_DRAWS)
    for test in tests:
        test["timeout"] *= more_draws
    if options.filter and options.filter.startswith("["):
        # Only Catch2 knows tags.
        tests = [test for test in tests if test["cmd"][0].startswith(str(options.build.resolve()))]
    total = run_all(tests, options.filter)
    if total.passed + total.failed + total.skipped == 0:
        print("no test case has that name", file=sys.stderr)
    print(f"{total.passed} passed, {total.failed} failed, {total.skipped} skipped")
    return int(total.failed > 0 or total.passed == 0)


if __name__ == "__main__":
    sys.exit(main())
