"""tools/check_structure.py: each rule finds what is one too large and nothing that fits; the ratchet lets nothing grow."""

import contextlib
import io
import json
import shutil
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

from closing_line import main

TOOL = Path(__file__).resolve().parents[2] / "tools" / "check_structure.py"
sys.path.insert(0, str(TOOL.parent))
import check_structure  # noqa: E402


def lines(of, count):
    return "".join(of.format(number) for number in range(count))


def klass(body):
    return {"lib/a/thing.hpp": f"namespace fsdp {{\nclass Thing {{\n{body}}};\n}}\n"}


def implemented_in(count):
    declared = klass("public:\n" + lines("  int f{}();\n", count))
    return declared | {f"lib/a/part{number}.cpp": f"namespace fsdp {{\nint Thing::f{number}() {{ return 0; }}\n}}\n"
                       for number in range(count)}


def tested(folder, count):
    """Tests of files in lib/a that lie in the folder."""
    return {f"{place}/{name}.{end}": "" for number in range(count)
            for place, name, end in [("lib/a", f"x{number}", "hpp"), (folder, f"test_x{number}", "cpp")]}


INDEX = "docs/internals/tests.md"
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
    "inner parts": ("lib/api/f.cpp", 0, lambda count: {"lib/api/f.cpp": lines("auto {} = group.changes();\n", count)}),
    "changeable parts": ("lib/group/f.hpp", 0, lambda count: {"lib/group/f.hpp": lines("GroupParts& parts() {{\n", count)}),
    "changing structs": ("Thing", 0, lambda count: {
        "lib/a/thing.hpp": f"struct Thing {{\n  int value;\n{lines('  void f{}();' + chr(10), count)}}};\n"}),
    "callbacks": ("lib/group/f.hpp", 0, lambda count: {"lib/group/f.hpp": lines("std::function<void()> f{};\n", count)}),
    "untyped owners": ("lib/a/f.hpp", 0, lambda count: {"lib/a/f.hpp": lines("std::shared_ptr<void> f{};\n", count)}),
    "written settings": ("lib/api/f.cpp", 0, lambda count: {"lib/api/f.cpp": lines("group.config.value = {};\n", count)}),
    "decisions": ("lib/root/f.hpp", 0, lambda count: {
        "lib/root/f.hpp": lines("struct S{} {{ enum class Waits {{ kNow }}; }};\n", count)}),
    "homes": ("Thing", 1, lambda count: {f"lib/a/f{number}.hpp": "struct Thing { int value; };\n" for number in range(count)}),
    "fragments": ("lib/a", 0, lambda count: {"lib/a/f.hpp": lines("/// Of the thing.\nint f{};\n", count)}),
    "foreign ids": ("docs/page.md", 0, lambda count: {"docs/page.md": lines("Line {} shows what A7 says.\n", count)}),
    "long lines": ("lib/a/f.cpp", 0, lambda count: {"lib/a/f.cpp": lines(f"// {'x' * 125}{{}}\n", count)}),
    "test folders": ("test/b", 0, lambda count: {"lib/b/y.hpp": ""} | tested("test/b", count)),
    "unlisted tests": (INDEX, 0, lambda count: {INDEX: "", **{f"test/a/test_f{number}.py": "" for number in range(count)}}),
    "dead names": ("lib/a/README.md", 0, lambda count: {"lib/a/README.md": lines("- `gone{}`: what was there.\n", count)}),
}
# By rule: files in which nothing is too much, though it looks so.
FINE = {
    "members": {"lib/a/f.hpp": f"struct ThingOptions {{\n{lines('  int m{};' + chr(10), 20)}}};\n"},
    "inner parts": {"lib/root/f.cpp": "auto& changes = group.changes();\n"},
    "changing structs": {"lib/a/f.hpp": "struct Thing {\n  explicit Thing(int v);\n  int get() const;\n  static Thing of();\n  int value;\n};\n"},
    "written settings": {"lib/api/f.cpp": "if (group.config.value == 1) use(options().value);\n"},
    "homes": {f"lib/a/f{number}.cpp": f"class C{number} {{ struct Options {{ int a; }}; enum class Kind {{ kA }}; }};\n" for number in range(3)},
    "fragments": {"lib/a/f.hpp": "/// The thing.\n/// Of two, the first.\nint f;  ///< of the other\n"},
    "foreign ids": {"docs/page.md": "T5 on an A100; `A7` in code, test-A7, \"A7\".\n"},
    "test folders": {"test/runtime/test_x.cpp": '#include "fsdp/fsdp.hpp"\n', "lib/a/x.hpp": "", INDEX: "| x | `runtime/` |\n"},
    "unlisted tests": {INDEX: "| a | `a/test_f.py`, `test_g.py` |\n| b | `b/` |\n", "test/a/test_f.py": "", "test/a/test_g.py": "",
                       "test/b/test_h.cpp": ""},
    "dead names": {"lib/a/README.md": "- `here`, `folder/`: with `gone` behind the colon.\n", "lib/a/here.hpp": "", "lib/a/folder/f.hpp": ""},
}


@unittest.skipUnless(shutil.which("ctags"), "ctags is not installed")
class Structure(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        self.ratchet = self.root / "ratchet.json"

    def check(self, files, ratchet=None, *options):
        for folder in ("lib", "include", "bindings/src", "test", "docs"):
            shutil.rmtree(self.root / folder, ignore_errors=True)
            (self.root / folder).mkdir(parents=True)
        for name, text in files.items():
            (self.root / name).parent.mkdir(exist_ok=True, parents=True)
            (self.root / name).write_text(text)
        if ratchet is not None:
            self.ratchet.write_text(json.dumps(ratchet))
        errors, arguments = io.StringIO(), [str(TOOL), str(self.root), "--ratchet", str(self.ratchet), *options]
        with contextlib.redirect_stderr(errors), mock.patch.object(sys, "argv", arguments):
            return check_structure.main(), errors.getvalue()

    def test_what_fits_a_rule_passes_and_one_more_fails_by_name(self):
        for rule, (subject, limit, files) in RULES.items():
            with self.subTest(rule=rule):
                self.assertEqual(self.check(files(limit), {}), (0, ""))
                code, errors = self.check(files(limit + 1), {})
                self.assertEqual(code, 1)
                self.assertIn(f"{subject} has {limit + 1} ", errors)
                self.assertIn(f"{limit} are allowed", errors)

    def test_what_only_looks_so_passes(self):
        for rule, files in FINE.items():
            with self.subTest(rule=rule):
                self.assertEqual(self.check(files, {}), (0, ""))

    def test_every_rule_is_in_this_test(self):
        self.assertEqual(sorted(check_structure.RULES), sorted(RULES))

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
