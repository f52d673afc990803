"""tools/check_structure.py: each rule finds what is one too large and nothing that fits; the ratchet lets nothing grow."""

import json
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

from closing_line import main

TOOL = Path(__file__).resolve().parents[2] / "tools" / "check_structure.py"


def lines(of, count):
    return "".join(of.format(number) for number in range(count))


def klass(body):
    return {"lib/a/thing.hpp": f"namespace fsdp {{\nclass Thing {{\n{body}}};\n}}\n"}


def implemented_in(count):
    declared = klass("public:\n" + lines("  int f{}();\n", count))
    return declared | {f"lib/a/part{number}.cpp": f"namespace fsdp {{\nint Thing::f{number}() {{ return 0; }}\n}}\n"
                       for number in range(count)}


# By rule: its subject, its limit, and files with as many of what it counts.
RULES = {
    "members": ("Thing", 12, lambda count: klass("private:\n" + lines("  int m{}_;\n", count))),
    "public members": ("Thing", 0, lambda count: klass("public:\n" + lines("  int m{};\n", count))),
    "public functions": ("Thing", 20, lambda count: klass("public:\n" + lines("  int f{}() const;\n", count))),
    "flags": ("Thing", 3, lambda count: klass("private:\n" + lines("  bool is_{}_ = false;\n", count))),
    "sources": ("Thing", 2, implemented_in),
    "header lines": ("lib/a/long.hpp", 200, lambda count: {"lib/a/long.hpp": lines("// {}\n", count)}),
    "source lines": ("lib/a/long.cpp", 300, lambda count: {"lib/a/long.cpp": lines("// {}\n", count)}),
    "function lines": ("lib/a/f.cpp: f", 40,
                       lambda count: {"lib/a/f.cpp": f"int f() {{\n{lines('  // {}' + chr(10), count - 2)}}}\n"}),
    "files": ("lib/a", 30, lambda count: {f"lib/a/f{number}.cpp": "" for number in range(count)}),
    "friends": ("lib/a/thing.hpp", 0, lambda count: klass(lines("  friend class Other{};\n", count))),
}


@unittest.skipUnless(shutil.which("ctags"), "ctags is not installed")
class Structure(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        self.ratchet = self.root / "ratchet.json"

    def check(self, files, ratchet=None, *options):
        for folder in ("lib", "include", "bindings/src"):
            shutil.rmtree(self.root / folder, ignore_errors=True)
            (self.root / folder).mkdir(parents=True)
        for name, text in files.items():
            (self.root / name).parent.mkdir(exist_ok=True)
            (self.root / name).write_text(text)
        if ratchet is not None:
            self.ratchet.write_text(json.dumps(ratchet))
        ran = subprocess.run([sys.executable, str(TOOL), str(self.root), "--ratchet", str(self.ratchet), *options],
                             text=True, capture_output=True)
        return ran.returncode, ran.stderr

    def test_what_fits_a_rule_passes_and_one_more_fails_by_name(self):
        for rule, (subject, limit, files) in RULES.items():
            with self.subTest(rule=rule):
                self.assertEqual(self.check(files(limit), {}), (0, ""))
                code, errors = self.check(files(limit + 1), {})
                self.assertEqual(code, 1)
                self.assertIn(f"{subject} has {limit + 1} ", errors)
                self.assertIn(f"{limit} are allowed", errors)

    def test_what_the_ratchet_allows_passes_and_may_not_grow(self):
        for rule, (subject, limit, files) in RULES.items():
            allowed = {rule: {subject: limit + 2}}
            with self.subTest(rule=rule):
                self.assertEqual(self.check(files(limit + 2), allowed), (0, ""))
                self.assertIn(f"{limit + 2} are allowed", self.check(files(limit + 3), allowed)[1])

    def test_what_has_shrunk_is_to_be_taken_from_the_ratchet_and_tighten_does_it(self):
        for rule, (subject, limit, files) in RULES.items():
            allowed = {rule: {subject: limit + 2}}
            with self.subTest(rule=rule):
                code, errors = self.check(files(limit + 1), allowed)
                self.assertEqual(code, 1)
                self.assertIn("--tighten", errors)
                self.assertEqual(self.check(files(limit + 1), allowed, "--tighten"), (0, ""))
                self.assertEqual(json.loads(self.ratchet.read_text()), {rule: {subject: limit + 1}})
                self.assertEqual(self.check(files(limit), None, "--tighten"), (0, ""))
                self.assertEqual(json.loads(self.ratchet.read_text()), {})

    def test_tighten_allows_nothing_new(self):
        _, limit, files = RULES["members"]
        self.assertEqual(self.check(files(limit + 1), {}, "--tighten")[0], 1)
        self.assertEqual(json.loads(self.ratchet.read_text()), {})


if __name__ == "__main__":
    main()
