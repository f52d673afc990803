"""The documentation's site: it is built without a warning, has every page, and needs no network. And C++ lines that have
changed lie as the formatter lays them. `tools/test --suite documentation` runs this.
"""

import re
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "test" / "processes"))
sys.path.insert(0, str(ROOT / "tools"))
import check_format  # noqa: E402
from closing_line import main  # noqa: E402

# What a page loads by itself, as against a link that is followed.
LOADED = re.compile(r"<(?:script|img|iframe)\b[^>]*\bsrc=\"(?:https?:)?//"
                    r"|<link\b[^>]*\brel=\"stylesheet\"[^>]*\bhref=\"(?:https?:)?//")


class Site(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.site = Path(tempfile.mkdtemp(prefix="fsdp-site-"))
        cls.addClassCleanup(shutil.rmtree, cls.site)
        cls.built = subprocess.run([ROOT / "tools" / "docs", "--output", cls.site], text=True, stdout=subprocess.PIPE,
                                   stderr=subprocess.STDOUT)

    def text(self, page):
        return (self.site / page).read_text()

    def test_it_is_built_without_a_broken_link_an_unknown_name_or_another_warning(self):
        self.assertEqual(self.built.returncode, 0, self.built.stdout)

    def test_each_page_is_in_it(self):
        pages = {str(path.relative_to(ROOT / "docs").with_suffix(".html")) for path in (ROOT / "docs").rglob("*.md")}
        self.assertGreater(len(pages), 30)
        self.assertEqual(sorted(page for page in pages if not (self.site / page).exists()), [])

    def test_names_of_headers_and_of_the_package_are_explained(self):
        sharding = self.text("reference/cpp/sharding.html")
        self.assertIn('id="cpp-fully_shard"', sharding)
        self.assertIn("Throws", sharding)
        self.assertIn('id="cpp-FSDP_VERSION_MAJOR"', self.text("reference/cpp/inspection.html"))
        self.assertIn('id="fsdp.fully_shard"', self.text("reference/python/sharding.html"))

    def test_no_page_loads_anything_from_elsewhere(self):
        found = {str(page.relative_to(self.site)): LOADED.findall(page.read_text()) for page in self.site.rglob("*.html")}
        self.assertGreater(len(found), 30)
        self.assertEqual({page: loaded for page, loaded in found.items() if loaded}, {})


class Format(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        if shutil.which("git-clang-format") is None:
            subprocess.run([ROOT / "tools" / "setup", "--package", "clang-format", "--environment-only"], check=True)

    def test_changed_lines_are_as_the_formatter_lays_them(self):
        if not check_format.has_commit(ROOT, check_format.SINCE):
            self.skipTest(f"commit {check_format.SINCE} is not here: this needs a clone with its history")
        self.assertEqual(check_format.changes(ROOT, check_format.SINCE), "")

    def test_a_line_is_found_if_it_has_changed_and_left_alone_if_it_has_not(self):
        with tempfile.TemporaryDirectory(prefix="fsdp-format-") as folder:
            def git(*command):
                subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *command], cwd=folder, check=True,
                               stdout=subprocess.DEVNULL)
            shutil.copy(ROOT / ".clang-format", folder)
            file = Path(folder) / "lib" / "one.cpp"
            file.parent.mkdir()
            file.write_text("int  old ;\n\n")
            git("init", "-q")
            git("add", "-A")
            git("commit", "-qm", "first")
            self.assertEqual(check_format.changes(folder, "HEAD"), "")
            file.write_text("int  old ;\n\nint fine;\n")
            self.assertEqual(check_format.changes(folder, "HEAD"), "")
            file.write_text("int  old ;\n\nint  bad ;\n")
            self.assertIn("+int bad;", check_format.changes(folder, "HEAD"))
            self.assertNotIn("+int old;", check_format.changes(folder, "HEAD"))
            with self.assertRaises(RuntimeError):
                check_format.changes(folder, "no-such-commit")


if __name__ == "__main__":
    main()
