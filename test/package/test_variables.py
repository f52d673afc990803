"""The documentation's tables of environment variables against the code: each is read where its row says, and each that is
read is in a table."""

import re
import sys
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "test" / "processes"))
from closing_line import main  # noqa: E402

FOLDERS = ["lib", "include", "bindings", "bench", "tools", "test"]
PAGE = ROOT / "docs" / "reference" / "environment.md"
LIBRARY = Path("lib/base/environment.cpp")
# What Python runs at its start, before there is a library.
HOOK = Path("bindings/fsdp/_import_hook.py")
HOOKS_READER = "`python -m fsdp enable`"
# Every program's, which the scripts pass on or look into.
THE_SYSTEMS = {"PATH", "PYTHONPATH", "CXX"}
# Where the table's readers are; None: not in this tree, but the variable is set or asked for here.
READERS = {"library": ["lib"], HOOKS_READER: ["bindings"], "tools": ["tools"], "tests": ["test"], "Python's tests": ["test"],
           "property test": ["test/property"], "`test/gpu`": ["test/gpu"], "`bench/`": ["bench"],
           "`bench/run.py`": ["bench"], "LibTorch": None, "NCCL": None, "NCCL 2.26": None}

NAME = r"[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)*"
PYTHON = [rf"environ\.(?:get|setdefault)\(f?[\"']({NAME})[\"']", rf"environ\[[\"']({NAME})[\"']\](?!\s*=[^=])",
          rf"getenv\([\"']({NAME})[\"']", rf"[\"']({NAME})[\"'] (?:not )?in os\.environ"]
# The scripts end at a variable that is not set, so one from outside has something to be used instead.
SHELL = [rf"\$\{{({NAME}):?[-+?]"]


def files():
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and "results" not in path.parts and "__pycache__" not in path.parts:
                try:
                    yield path.relative_to(ROOT), path.read_text()
                except UnicodeDecodeError:
                    pass


def names_read(path, text):
    """The variables that a file reads."""
    if path == Path(__file__).relative_to(ROOT):
        return set()
    if path.suffix in (".cpp", ".hpp"):
        # Names reach getenv through functions and tables of the same file. RANK is the one without an underscore.
        return set(re.findall(r'"((?:[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+)|RANK)"', text)) if "getenv(" in text else set()
    if path.suffix == ".py":
        return {name for pattern in PYTHON for name in re.findall(pattern, text)}
    if text.startswith("#!/usr/bin/env bash") or path.suffix == ".sh":
        return {name for pattern in SHELL for name in re.findall(pattern, text)}
    return set()


def table():
    """By name: who reads it."""
    found = {}
    for row in re.findall(r"^\| (`.*) \|$", PAGE.read_text(), re.MULTILINE):
        names, readers, _ = row.split(" | ", 2)
        for name in re.findall(r"`([^`]*)`", names):
            if name in found:
                raise AssertionError(f"{name} is in two rows")
            found[name] = set(re.split(r", | and ", readers))
    return found


class Variables(unittest.TestCase):
    def setUp(self):
        self.texts = dict(files())
        self.read = {path: names_read(path, text) - THE_SYSTEMS for path, text in self.texts.items()}
        self.table = table()

    def test_every_variable_that_the_code_reads_is_in_the_table(self):
        self.assertIn(Path("tools/common.sh"), self.read)
        missing = {str(path): names - self.table.keys() for path, names in self.read.items()}
        self.assertEqual({path: names for path, names in missing.items() if names}, {})

    def test_every_variable_in_the_table_is_read_by_whom_it_says(self):
        for name, readers in self.table.items():
            for reader in readers:
                with self.subTest(name=name, reader=reader):
                    self.assertIn(reader, READERS)
                    folders = READERS[reader]
                    if folders is None:
                        self.assertTrue(any(name in text for text in self.texts.values()))
                    else:
                        there = [path for path, names in self.read.items() if name in names
                                 and any(path.is_relative_to(folder) for folder in folders)]
                        self.assertNotEqual(there, [])

    def test_one_file_of_the_library_and_one_of_the_package_read_variables_and_the_table_says_exactly_which(self):
        of_library = ("lib", "include", "bindings")
        readers = {path for path, names in self.read.items() if path.parts[0] in of_library and names}
        self.assertEqual(readers, {LIBRARY, HOOK})
        self.assertEqual(self.read[HOOK], {name for name, readers in self.table.items() if HOOKS_READER in readers})
        self.assertEqual(self.read[LIBRARY], {name for name, readers in self.table.items() if "library" in readers})


if __name__ == "__main__":
    main()
