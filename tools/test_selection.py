"""Which tests, and which of their cases, a run is to have.

What a change reaches is told by the layers of lib/: a layer is used by those behind it alone, so its files reach their
tests and no others. A file of tests reaches itself.
"""

import json
import re
import subprocess
from pathlib import Path

from test_programs import Cases, suite_of

# What tests the benchmarks is built and run beside them, by test/bench/run.
BENCHMARKS = "bench"
# The suites that see each layer, from the first one on. What is behind them sees it too.
LAYERS = [
    ({"base", "comm"}, {"comm"}),
    ({"mesh", "tensor", "collectives"}, {"tensor"}),
    ({"dtensor"}, {"dtensor"}),
    ({"schedule", "dispatch", "param", "trace", "group", "root"}, {"group", "late_device"}),
    ({"module", "api"}, {"runtime", "property", BENCHMARKS, "processes", "package", "python", "gpu"}),
    ({"checkpoint"}, {"checkpoint", "processes", "python"}),
]
# Folders of test/ whose files are part of another one's program.
PROGRAMS = {"schedule": "group", "trace": "group"}
# Tests that read the documents, and what of them.
READERS = {"README.md": {"test_documents.py", "test_wheel.py"},
           "tools": {"test_documents.py"},  # the template of README.md's table
           "docs": {"test_documents.py", "test_examples.py", "test_quickstarts.py", "test_variables.py"},
           "examples": {"test_documents.py", "test_examples.py", "test_quickstarts.py"}}
FAILED = "failed-tests.json"


def of_benchmarks(test):
    return suite_of(test) == BENCHMARKS


def everything(tests):
    return [(test, Cases()) for test in tests]


def is_catch2(test):
    return Path(test["cmd"][0]).name.startswith("fsdp_test_")


def has_cases(test):
    """A tool that is itself the test, such as tools/fuzz, has none to choose from."""
    return is_catch2(test) or any(re.fullmatch(r"test_\w+\.py", Path(part).name) for part in test["cmd"])


def with_text(tests, text):
    # Only Catch2 knows tags.
    can_choose = is_catch2 if text.startswith("[") else has_cases
    return [(test, Cases(text=text)) for test in tests if can_choose(test)]


def write_failed(build, failed):
    """failed: of the last run, the names of the cases by test; none for a test that failed as a whole."""
    (build / FAILED).write_text(json.dumps(failed, indent=1))


def failed_before(tests, build):
    path = build / FAILED
    known = json.loads(path.read_text()) if path.exists() else {}
    return [(test, Cases(names=tuple(known[test["name"]]))) for test in tests if test["name"] in known]


def changed_files(root, since):
    """Paths that differ from the commit, and those that git does not know yet."""
    def git(*arguments):
        return subprocess.run(["git", "-C", str(root), *arguments], check=True, text=True,
                              capture_output=True).stdout.splitlines()
    return sorted({*git("diff", "--name-only", since), *git("ls-files", "--others", "--exclude-standard")})


def suites_that_see(layer):
    """Of lib/: those of the layer itself and of the ones behind it."""
    for place, (layers, _) in enumerate(LAYERS):
        if layer in layers:
            return set().union(*(suites for _, suites in LAYERS[place:]))
    return None


def reached_by(tests, files):
    """Pairs of a test and its cases. A file that no rule knows reaches all tests; documents reach none."""
    suites, stems, modules = set(), {}, set()
    for file in map(Path, files):
        parts = file.parts
        if file.suffix in (".md", ".jsonl", ".png", ".svg") or parts[0] in (".ci", "docs", "examples"):
            modules |= READERS.get(parts[0], set())
            continue
        found = None
        if parts[0] == "lib" and len(parts) > 2:
            found = suites_that_see(parts[1])
        elif parts[0] == "bindings":
            found = {"bindings", "python", "gpu", "package", "processes"}
        elif parts[0] == "bench":
            found = {BENCHMARKS}
        elif parts[0] == "tools" and parts[1] == "llama":
            found = {"processes"}
        elif parts[:2] == ("test", "property"):
            found = {"property"}
        elif parts[:2] == ("test", "python") and not file.stem.startswith("test_"):
            found = {"python"}
        elif parts[0] == "test" and len(parts) == 3:
            # What else stands beside tests, others may use.
            if file.suffix == ".cpp" and file.stem.startswith("test_"):
                stems.setdefault(PROGRAMS.get(parts[1], parts[1]), set()).add(file.stem)
                continue
            if file.suffix == ".py" and file.stem.startswith("test_"):
                modules.add(file.name)
                continue
        if found is None:
            return everything(tests)
        suites |= found
    chosen = []
    for test in tests:
        suite = suite_of(test)
        if suite in suites or any(Path(part).name in modules for part in test["cmd"]):
            chosen.append((test, Cases()))
        elif suite in stems and len(test["cmd"]) == 1:
            chosen.append((test, Cases(files=tuple(sorted(stems[suite])))))
    return chosen
