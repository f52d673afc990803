"""The documentation against the code: every public name is in the reference, every piece of code in a page stands in a program
of examples/, and every option of a script is on the page of command lines."""

import ast
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "test" / "processes"), str(ROOT / "tools")]
import docs_headers  # noqa: E402
import docs_records  # noqa: E402
import quickstarts  # noqa: E402
from closing_line import main  # noqa: E402

DOCS, EXAMPLES, HEADERS = ROOT / "docs", ROOT / "examples", ROOT / "include" / "fsdp"
PYTHON_NAMES = re.compile(r"^::: fsdp\.(\w+)$|\{ #fsdp\.(\w+) \}|<a id=\"fsdp\.(\w+)\">", re.MULTILINE)
# With their commands, which have options of their own.
SCRIPTS = {"setup": [], "test": [], "bench": [], "docs": [], "fuzz": [], "figures": [], "timeline": [], "wheel": [],
           "checkpoint": ["list", "verify", "diff", "convert"]}


def pages(folder=""):
    return {str(path.relative_to(DOCS)): path.read_text() for path in sorted((DOCS / folder).rglob("*.md"))}


def exported():
    """fsdp.__all__, from the source: importing the package needs the extension."""
    tree = ast.parse((ROOT / "bindings" / "fsdp" / "__init__.py").read_text())
    (names,) = [node.value for node in tree.body
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"]
    return ast.literal_eval(names)


class Reference(unittest.TestCase):
    def test_each_header_is_on_one_page(self):
        found = re.findall(r"^::: fsdp/([\w/]+\.hpp)$", "\n".join(pages("reference/cpp").values()), re.MULTILINE)
        # What the others include, and a part of one that has nothing public of its own.
        without = {docs_headers.UMBRELLA, "activation_checkpoint_call.hpp", "nested_tensors.hpp"}
        headers = {str(path.relative_to(HEADERS)).removesuffix(docs_headers.MADE) for path in HEADERS.rglob("*.hpp*")}
        self.assertEqual(sorted(found), sorted(headers - without))

    def test_each_name_of_the_package_is_on_one_page(self):
        found = ["".join(match) for match in PYTHON_NAMES.findall("\n".join(pages("reference/python").values()))]
        self.assertEqual(sorted(found), sorted(exported()))

    @unittest.skipIf(shutil.which("doxygen") is None or shutil.which("ctags") is None,
                     "needs doxygen and ctags; tools/docs and tools/setup install them")
    def test_each_name_that_ctags_finds_in_a_header_is_in_its_reference(self):
        command = ["ctags", "--languages=C++", f"--langmap=C++:+.hpp{docs_headers.MADE}", "--kinds-C++=cegmpstv",
                   "--fields=+asZ", "--extras=", "--_xformat=%K|%s|%a|%N", "-x",
                   *map(str, sorted(HEADERS.rglob("*.hpp*")))]
        tags = subprocess.run(command, check=True, text=True, capture_output=True).stdout.splitlines()
        with tempfile.TemporaryDirectory() as folder:
            by_header = docs_headers.read_names(docs_headers.run_doxygen(ROOT, Path(folder)))
        found = {name.name for names in by_header.values() for name in docs_headers.all_names(names)}
        tags = [tag.split("|") for tag in tags]
        scopes = {"fsdp", *(f"{scope}::{name}" for kind, scope, _, name in tags if kind in ("class", "struct", "enum"))}
        # Nobody looks up how a value is destroyed or compared.
        wanted = {f"{scope}::{name}".removeprefix("fsdp::") for _, scope, access, name in tags
                  if scope in scopes and "::detail" not in scope and access not in ("private", "protected")
                  and not re.match(r"~|operator|__anon", name)}
        self.assertGreater(len(wanted), 500)
        self.assertEqual(sorted(wanted - found), [])


def without_indents(code):
    """A page shows from the left margin what stands in a function."""
    return re.sub(r"(?m)^ +", "", code)


class Code(unittest.TestCase):
    def expect_in_examples(self, language, suffix):
        programs = [path.read_text() for path in EXAMPLES.glob(f"*{suffix}")]
        if language == "python":
            programs.append(quickstarts.python_program())
        programs = [without_indents(program) for program in programs]
        shown = {(name, block) for name in [*pages(), "../README.md"] for block in quickstarts.blocks(DOCS / name, language)}
        self.assertGreater(len(shown), 10)
        for name, block in sorted(shown):
            with self.subTest(page=name, block=block):
                self.assertTrue(any(without_indents(block) in program for program in programs))

    def test_the_code_in_cpp_stands_in_a_program_that_is_run(self):
        self.expect_in_examples("cpp", ".cpp")

    def test_the_code_in_python_stands_in_a_program_that_is_run(self):
        self.expect_in_examples("python", ".py")


class Records(unittest.TestCase):
    def test_tables_say_what_the_benchmarks_records_say_and_each_record_that_a_page_names_is_there(self):
        for name, text in pages().items():
            self.assertTrue(docs_records.renewed(text) == text, f"{name}: run python3 tools/docs_records.py")
            for record in re.findall(r"`([\w-]+\.jsonl)`", text):
                self.assertTrue((ROOT / "bench" / "results" / record).exists(), f"{name}: {record}")


    def test_what_sentences_say_of_the_sweep_on_simulated_networks_is_what_its_record_says(self):
        sweeps = [docs_records.lines_of(name, "defaults=True") for name in docs_records.shown_records()]
        (steps,) = filter(None, sweeps)
        rounding_us = 0.01  # as bench/overlap_simulated.py grades
        close = sum(step["exposed_us"] <= 1.1 * (step["bound_us"] - step["compute_us"]) + rounding_us for step in steps)
        at_most_fsdp2 = sum(step["exposed_us"] <= step["fsdp2_exposed_us"] + rounding_us for step in steps)
        self.assertIn(f"With the defaults the exposed communication of {close} of {len(steps)} steps is within 10%",
                      pages()["internals/overlap.md"])
        self.assertIn(f"Of {len(steps)} steps on simulated networks, with the defaults, the exposed communication of "
                      f"{at_most_fsdp2} is at most FSDP2's, and that of {close} within",
                      (ROOT / "README.md").read_text())


class Readme(unittest.TestCase):
    def test_its_figures_are_those_of_the_records_that_the_pages_show(self):
        text = (ROOT / "README.md").read_text()
        self.assertTrue(docs_records.README_MARKED.search(text))
        self.assertTrue(docs_records.renewed_readme(text) == text, "run python3 tools/docs_records.py")

    def test_it_is_short_enough_to_be_read_and_its_links_lead_somewhere(self):
        text = (ROOT / "README.md").read_text()
        self.assertLessEqual(len(text.splitlines()), 150)
        links = re.findall(r"\]\(([^)#:]+)\)", text)
        self.assertGreater(len(links), 10)
        self.assertEqual([link for link in links if not (ROOT / link).exists()], [])


class Messages(unittest.TestCase):
    def test_each_message_that_troubleshooting_explains_is_one_of_the_codes(self):
        sources = [path.read_text() for folder in ("lib", "bindings") for path in sorted((ROOT / folder).rglob("*"))
                   if path.suffix in (".cpp", ".hpp", ".py")]
        # A message may go over several literals, and has names and numbers in it that the code puts there.
        texts = re.sub(r'"\s*f?"', "", "\n".join(sources))
        tables = re.findall(r"(?m)^\| [^|]*message [^|]*\|.*\n(?:\|.*\n)+", (DOCS / "troubleshooting.md").read_text())
        cells = re.findall(r"(?m)^\| ([^|]*) \|", "".join(tables))
        messages = [message for cell in cells for message in cell.split("`")[1::2] if " " in message]
        self.assertGreater(len(messages), 12)
        for message in messages:
            for piece in re.split(r"\.\.\.|'[^']*'|\d+(?!D)(?:\.\d+)?", message):
                with self.subTest(message=message, piece=piece):
                    self.assertTrue(piece.strip() in texts, "in no source")


class CommandLines(unittest.TestCase):
    def test_each_option_that_a_script_prints_is_on_the_page_and_each_on_the_page_is_the_scripts(self):
        sections = re.split(r"^## ", (DOCS / "reference" / "command-lines.md").read_text(), flags=re.MULTILINE)
        for script, commands in SCRIPTS.items():
            with self.subTest(script=script):
                (section,) = [each for each in sections if each.startswith(f"`tools/{script}`")]
                calls = [[ROOT / "tools" / script, *command, "--help"] for command in [[], *([each] for each in commands)]]
                usage = "".join(subprocess.run(call, text=True, check=True, stdout=subprocess.PIPE).stdout for call in calls)
                shown = set(re.findall(r"^  (?:-h, )?(--[a-z-]+)", usage, re.MULTILINE)) - {"--help", "--version"}
                listed = set(re.findall(r"^\|[^|]*", section, re.MULTILINE))
                self.assertEqual(set(re.findall(r"`(--[a-z-]+)", " ".join(listed))), shown)


if __name__ == "__main__":
    main()
