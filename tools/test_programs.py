"""Runs one of Meson's tests and counts its cases.

Programs are Catch2's and report each of their cases; Python modules close with the line "N passed, N failed, N skipped".
"""

import os
import re
import shlex
import signal
import subprocess
import tempfile
import time
import xml.etree.ElementTree as ET
from dataclasses import dataclass, field
from pathlib import Path

CLOSING_LINE = re.compile(r"^(\d+) passed, (\d+) failed, (\d+) skipped$", re.MULTILINE)
# How unittest names what has not passed.
UNITTEST_FAILURE = re.compile(r"^(?:FAIL|ERROR): (\w+) \(", re.MULTILINE)


@dataclass
class Outcome:
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    report: str = ""
    failed_cases: list = field(default_factory=list)  # by name; empty where a program failed as a whole
    repeat: str = ""  # the command that runs what failed once more
    cpu_s: float = 0.0


@dataclass(frozen=True)
class Cases:
    """Which cases of a test are to run. All, if nothing is given."""
    text: str = ""  # in their name, or a [tag]
    names: tuple = ()
    files: tuple = ()  # Catch2: the stems of the files that they stand in


def has_gpu():
    return Path("/dev/nvidiactl").exists()


# A suite that waits for threads all the time, and hardly for processors.
WOKEN_AT_ONCE = "late_device"


def suite_of(test):
    return test["suite"][0].split(":")[-1]


def wait_when_woken():
    """From now on no thread of this process and of its children preempts the one that wakes it (Linux's SCHED_BATCH).

    gloo's thread does not sleep while a connection's lock is taken. A rank that writes holds it, wakes the other rank's thread
    and is preempted by that: where ranks outnumber processors, two thirds of their time went there.
    """
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


@dataclass
class Ran:
    exit_code: int | None  # None after a timeout
    output: str
    cpu_s: float


def run(command, environment, timeout_s, before=wait_when_woken):
    """before: called in the new process."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, env={**os.environ, **environment}, stdin=subprocess.DEVNULL,
                                   stdout=output, stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=before)
        deadline = time.monotonic() + timeout_s
        is_late = False
        while True:
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            if pid:
                break
            if time.monotonic() > deadline and not is_late:
                is_late = True
                # The whole session: a test may have started processes of its own.
                os.killpg(process.pid, signal.SIGKILL)
            time.sleep(0.02)
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        return Ran(None if is_late else process.returncode, output.read().decode(errors="replace"),
                   usage.ru_utime + usage.ru_stime)


def how_it_ended(exit_code, timeout_s):
    if exit_code is None:
        return f"was ended after {timeout_s:.0f} s"
    if exit_code < 0:
        return f"was ended by {signal.Signals(-exit_code).name}"
    return f"ended with exit code {exit_code}"


def command_line(test, arguments):
    own = [f"{name}={value}" for name, value in test["env"].items()]
    return " ".join(shlex.quote(part) for part in [*(["env", *own] if own else []), *arguments])


def is_python(test):
    return len(test["cmd"]) > 1 and test["cmd"][1].endswith(".py")


def run_plain(test, cases, forks):
    """A test that is no Catch2 program. forks: test_forks.Forks, which run those in Python."""
    chosen = [argument for name in cases.names or ([cases.text.replace(" ", "_")] if cases.text else [])
              for argument in ("-k", name)]
    ran = (forks.run if is_python(test) else run)(test["cmd"] + chosen, test["env"], test["timeout"])
    counts = CLOSING_LINE.findall(ran.output)
    outcome = Outcome(*map(int, counts[-1])) if counts else Outcome(passed=int(ran.exit_code == 0))
    if ran.exit_code != 0 and outcome.failed == 0:
        outcome.failed = 1
    outcome.cpu_s = ran.cpu_s
    if outcome.failed:
        outcome.failed_cases = list(dict.fromkeys(UNITTEST_FAILURE.findall(ran.output)))
        outcome.report = f"{ran.output}\n{test['name']} {how_it_ended(ran.exit_code, test['timeout'])}\n"
        names = [argument for name in outcome.failed_cases for argument in ("-k", name)]
        outcome.repeat = command_line(test, test["cmd"] + names)
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


def specification(cases, with_gpu, folder):
    """Catch2's words for the cases; commas separate alternatives."""
    # An exclusion alone selects hidden tests too, which are what other tests start in processes.
    excluded = "~[.]" if with_gpu else "~[.]~[gpu]"
    if cases.names:
        names = Path(folder, "names")
        names.write_text("".join(f"{name}\n" for name in cases.names))
        return ["--input-file", str(names)]
    if cases.files:
        return ["--filenames-as-tags", ",".join(f"{excluded}[#{stem}]" for stem in cases.files)]
    if cases.text:
        return [excluded + (cases.text if cases.text.startswith("[") else f"*{cases.text}*")]
    return [excluded]


def count_gpu_cases(test, cases):
    if cases.names:
        return 0
    with tempfile.TemporaryDirectory() as folder:
        *options, chosen = specification(cases, with_gpu=True, folder=folder)
    ran = run(test["cmd"][:1] + [*options, "--list-test-names-only", "[gpu]" + chosen], test["env"], 60)
    return sum(bool(line.strip()) for line in ran.output.splitlines())


def run_catch2(test, cases):
    with tempfile.TemporaryDirectory() as folder:
        report = os.path.join(folder, "report.xml")
        chosen = specification(cases, has_gpu(), folder)
        ran = run(test["cmd"] + ["--reporter", "xml", "--out", report, *chosen], test["env"], test["timeout"],
                  None if suite_of(test) == WOKEN_AT_ONCE else wait_when_woken)
        finished, open_name = read_cases(report)
    failed = [case for case in finished if case.find("OverallResult").get("success") != "true"]
    skipped = [case for case in finished if case not in failed and is_skipped(case)]
    outcome = Outcome(len(finished) - len(failed) - len(skipped), len(failed), len(skipped))
    outcome.cpu_s = ran.cpu_s
    outcome.failed_cases = [case.get("name") for case in failed]
    # What the cases found comes last, where a reader of few lines looks.
    if failed and ran.output:
        outcome.report += f"{test['name']} printed:\n{ran.output}\n"
    outcome.report += "".join(map(describe, failed))
    # A crash, a timeout or a sanitizer's report, which no test case shows.
    if ran.exit_code != 0 and (open_name or not failed):
        outcome.failed += 1
        outcome.report += f"{ran.output}\n{test['name']} {how_it_ended(ran.exit_code, test['timeout'])}"
        outcome.report += f" in: {open_name}\n" if open_name else "\n"
        outcome.failed_cases += [open_name] if open_name else []
    if outcome.failed:
        outcome.repeat = "\n".join(command_line(test, [test["cmd"][0], name]) for name in outcome.failed_cases) or \
            command_line(test, test["cmd"][:1])
    if not has_gpu():
        outcome.skipped += count_gpu_cases(test, cases)
    return outcome


def is_catch2(test):
    """True for a program of ours that the build made."""
    with open(test["cmd"][0], "rb") as program:
        return program.read(4) == b"\x7fELF" and "python" not in os.path.basename(test["cmd"][0])


def run_test(test, cases, forks):
    if not os.path.exists(test["cmd"][0]):
        return Outcome(failed=1, report=f"{test['name']}: {test['cmd'][0]} has not been built\n", repeat="tools/test")
    return run_catch2(test, cases) if is_catch2(test) else run_plain(test, cases, forks)
