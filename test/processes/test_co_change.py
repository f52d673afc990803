"""tools/co_change.py: it finds the files that change together, under their names of today, and nothing else."""

import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

from closing_line import main

TOOL = Path(__file__).resolve().parents[2] / "tools" / "co_change.py"


class CoChange(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        self.git("init", "-q")
        self.count = 0

    def git(self, *arguments):
        subprocess.run(["git", "-C", str(self.root), "-c", "user.name=a", "-c", "user.email=a@b", *arguments], check=True,
                       capture_output=True)

    def commit(self, *names):
        self.count += 1
        for name in names:
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"// {name}\n" * 20 + f"// {self.count}\n")
        self.git("add", "-A")
        self.git("commit", "-q", "-m", "change")

    def pairs(self):
        found = subprocess.run([sys.executable, str(TOOL), str(self.root)], capture_output=True, text=True, check=True)
        return found.stdout.splitlines()

    def test_files_that_always_change_together(self):
        for step in range(12):
            self.commit("lib/a.cpp", "lib/b.hpp", *(["lib/c.cpp"] if step % 2 else []), "README.md")
        self.assertEqual(self.pairs(), ["lib/a and lib/b changed together in 12 of 12 commits"])

    def test_fewer_commits_or_a_smaller_share_say_nothing(self):
        for step in range(9):
            self.commit("lib/a.cpp", "lib/b.cpp")
        for step in range(12):
            self.commit("lib/c.cpp", *(["lib/d.cpp"] if step < 6 else []))
            self.commit("lib/d.cpp")
        self.assertEqual(len(self.pairs()), 1)
        self.assertIn("no two files", self.pairs()[0])

    def test_header_and_source_are_one_and_so_are_old_and_new_names(self):
        for step in range(7):
            self.commit("lib/old.cpp", "lib/old.hpp", "lib/b.cpp")
        (self.root / "lib/deep").mkdir()
        for suffix in ("cpp", "hpp"):
            self.git("mv", f"lib/old.{suffix}", f"lib/deep/new.{suffix}")
        self.git("commit", "-q", "-m", "move")
        for step in range(7):
            self.commit("lib/deep/new.cpp", "lib/deep/new.hpp", "lib/b.cpp")
        self.assertEqual(self.pairs(), ["lib/b and lib/deep/new changed together in 14 of 14 commits"])

    def test_a_commit_of_many_files_says_nothing(self):
        many = [f"lib/f{number}.cpp" for number in range(50)]
        for step in range(12):
            self.commit("lib/a.cpp", "lib/b.cpp", *many)
        self.assertIn("no two files", self.pairs()[0])

    def test_what_is_gone_is_not_named(self):
        for step in range(12):
            self.commit("lib/a.cpp", "lib/b.cpp")
        (self.root / "lib/b.cpp").unlink()
        self.commit("README.md")
        self.assertIn("no two files", self.pairs()[0])

    def test_without_a_history_it_says_so(self):
        with tempfile.TemporaryDirectory() as folder:
            found = subprocess.run([sys.executable, str(TOOL), folder], capture_output=True, text=True)
        self.assertNotEqual(found.returncode, 0)
        self.assertIn("no history", found.stderr)


if __name__ == "__main__":
    main()
