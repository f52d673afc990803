"""Programs that import torch's fully_shard, run under fsdp without a change: `python -m fsdp`, and `python -m fsdp enable`
in an environment made for the test."""

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import textwrap
import unittest
import venv
from pathlib import Path

import rank_results
import launch
from closing_line import main

# What a program sees of how it was started.
PROGRAM = """
import json, sys
main = sys.modules["__main__"]
print(json.dumps({"argv": sys.argv, "path": sys.path[0], "file": __file__, "name": __name__, "is_main": vars(main) is globals(),
                  "package": __package__ or "", "spec": getattr(__spec__, "name", None), "has_torch": "torch" in sys.modules}))
"""
OURS, TORCHS = "fsdp._fully_shard", "torch.distributed.fsdp"
# Names no option of the interpreter; sees the packages of the environment that the tests run in.
SEES = rank_results.SEES_PACKAGE
# Runs texts, each in a process that begins when torch has been imported, and prints what each has printed.
FORKS = """
import contextlib, io, json, os, sys
import torch
for environment, text in json.loads(sys.argv[1]):
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.environ.update(environment)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(text, {"__name__": "__main__"})
        with os.fdopen(writing, "w") as pipe:
            pipe.write(printed.getvalue())
            pipe.flush()
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        print(json.dumps(pipe.read()))
    assert os.wait()[1] == 0, text
"""


class Case(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.light = Path(folder.name)
        package = cls.light / "fsdp"
        package.mkdir()
        # The package but for what imports torch, which takes seconds.
        (package / "__init__.py").write_text(f"__path__.append({str(rank_results.PACKAGE / 'fsdp')!r})\n"
                                             "def replace_torch(): print('replaced')\n")

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(os.path.realpath(folder.name))

    def write(self, name, text):
        file = self.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))
        return file

    def run_python(self, *arguments, python=sys.executable, path=SEES, cwd=None, **more):
        return subprocess.run([str(part) for part in (python, *arguments)], cwd=cwd or self.folder, text=True,
                              capture_output=True, timeout=launch.patience(120),
                              env=launch.environment(PYTHONPATH=path, **more))

    def output(self, *arguments, **more):
        ran = self.run_python(*arguments, **more)
        self.assertEqual(ran.returncode, 0, ran.stderr)
        return ran.stdout

    def expect_error(self, code, says, *arguments, **more):
        ran = self.run_python(*arguments, **more)
        self.assertEqual(ran.returncode, code, ran.stderr)
        for text in [says] if isinstance(says, str) else says:
            self.assertIn(text, " ".join(ran.stderr.split()))
        return ran


    def expect_light_error(self, code, says, *arguments):
        return self.expect_error(code, says, *arguments, path=self.light)


class Command(Case):
    def expect_as_by_python(self, *arguments, cwd=None, path=None):
        plain = json.loads(self.output(*arguments, cwd=cwd))
        *said, under = self.output("-m", "fsdp", *arguments, cwd=cwd, path=path or self.light).splitlines()
        under = json.loads(under)
        self.assertEqual((plain.pop("has_torch"), under.pop("has_torch"), said),
                         (False, True, []) if path else (False, False, ["replaced"]))
        self.assertEqual(plain, under)
        return under

    def test_a_file_has_its_arguments_its_folder_and_its_names(self):
        self.write("a/train.py", PROGRAM)
        found = self.expect_as_by_python("a/train.py", "--lr", "1", "-m", "--", "enable", path=SEES)
        self.assertEqual(found["argv"], ["a/train.py", "--lr", "1", "-m", "--", "enable"])
        self.assertEqual(found["path"], str(self.folder / "a"))

    def test_its_program_has_this_packages_functions(self):
        self.write("train.py", "from torch.distributed.fsdp import fully_shard\nprint(fully_shard.__module__)")
        self.assertEqual(self.output("-m", "fsdp", "train.py").strip(), OURS)

    def test_a_link_to_a_file_has_the_folder_that_the_file_is_in(self):
        file = self.write("a/train.py", PROGRAM)
        os.symlink(file, self.folder / "link.py")
        self.assertEqual(self.expect_as_by_python("link.py")["path"], str(self.folder / "a"))

    def test_a_folder_runs_by_its_main(self):
        self.write("program/__main__.py", PROGRAM)
        self.assertEqual(self.expect_as_by_python(self.folder / "program", "1")["path"], str(self.folder / "program"))

    def test_a_module_runs_as_by_python_m(self):
        self.write("package/train.py", PROGRAM)
        found = self.expect_as_by_python("-m", "package.train", "--lr", "1")
        self.assertEqual((found["spec"], found["package"], found["path"]), ("package.train", "package", str(self.folder)))

    def test_a_program_called_as_a_command_runs_by_its_path(self):
        self.write("status", PROGRAM)
        self.expect_as_by_python("./status")

    def test_it_ends_as_the_program_ends(self):
        self.write("ends.py", "import sys; sys.exit(7)")
        self.expect_light_error(7, "", "-m", "fsdp", "ends.py")
        self.write("fails.py", "def f(): raise KeyError('trainer')\nf()")
        self.expect_light_error(1, "KeyError: 'trainer'", "-m", "fsdp", "fails.py")

    def test_what_is_wrong_is_said_in_one_line(self):
        self.expect_light_error(2, f"there is no program no.py ({self.folder}/no.py)", "-m", "fsdp", "no.py")
        self.expect_light_error(2, "there is no module no.such: No module named 'no'", "-m", "fsdp", "-m", "no.such")
        self.expect_light_error(2, f"there is no module no in {self.folder}", "-m", "fsdp", "-m", "no")
        self.expect_light_error(2, "required: PROGRAM", "-m", "fsdp")
        self.expect_light_error(2, "unrecognized arguments: --lr", "-m", "fsdp", "--lr", "train.py")
        self.expect_light_error(2, "enable takes no arguments, found --lr; a program of that name is ./enable",
                          "-m", "fsdp", "enable", "--lr")

    def test_with_another_torch_the_program_does_not_run(self):
        # What python -m imports first.
        self.write("site/sitecustomize.py", "import torch; torch.__version__ = '2.10.1'")
        self.write("train.py", "print('ran')")
        ran = self.expect_error(1, ["fsdp was built with torch", "2.10.1"], "-m", "fsdp", "train.py",
                                path=os.pathsep.join([str(self.folder / "site"), SEES]))
        self.assertEqual(ran.stdout, "")


class Enabled(Case):
    """In an environment of its own, which sees the packages of this one."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.environment = Path(os.path.realpath(folder.name), "env")
        venv.create(cls.environment, symlinks=True)
        cls.python = cls.environment / "bin" / "python"
        places = subprocess.run([cls.python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True,
                                capture_output=True, check=True)
        cls.site = Path(places.stdout.strip())
        Path(cls.site, "these.pth").write_text(f"{sysconfig.get_path('purelib')}\n{sysconfig.get_path('platlib')}\n")

    def run_python(self, *arguments, **more):
        return super().run_python(*arguments, **{"python": self.python, **more})

    def command(self, *arguments, **more):
        return self.output("-m", "fsdp", *arguments, path=self.light, **more)

    def enable(self):
        self.addCleanup(self.command, "disable")
        return self.command("enable")

    def forks(self, cases, **more):
        """What each text has printed, in an environment with these variables."""
        return [json.loads(line) for line in self.output("-c", FORKS, json.dumps(cases), **more).splitlines()]

    def files(self):
        return sorted(file.name for file in self.site.rglob("*") if "fsdp" in file.name)

    def maker(self, text="from torch.distributed.fsdp import fully_shard", **more):
        """Whose fully_shard a program gets that imports it so."""
        return self.output("-c", f"{text}\nprint(fully_shard.__module__)", **more).strip()

    def test_enable_names_what_it_writes_and_disable_what_it_removes(self):
        self.assertIn(f"not enabled: there is no {self.site}/fsdp_replace_torch.pth", self.command("disable"))
        written = [f"{self.site}/{name}" for name in ("fsdp_replace_torch.pth", "_fsdp_replace_torch.py")]
        self.assertEqual(self.enable().splitlines()[:2], [f"wrote {file}" for file in written])
        self.assertEqual(self.files(), ["_fsdp_replace_torch.py", "fsdp_replace_torch.pth"])
        self.assertIn(f"enabled: {', '.join(written)}\nFSDP_REPLACE_TORCH as it is now changes nothing",
                      self.command("status"))
        self.assertIn("as it is now replaces torch's names", self.command("status", FSDP_REPLACE_TORCH=1))
        Path(written[1]).write_text("# older\ndef install(): pass\n")
        self.assertIn("These files are of another version", self.command("status"))
        self.output("-c", "", FSDP_REPLACE_TORCH=1)  # which compiles it
        self.enable()  # over it
        self.assertNotIn("another version", self.command("status"))
        self.assertEqual(self.command("disable").splitlines(), [f"removed {file}" for file in written])
        self.assertEqual(self.files(), [])
        ran = self.run_python("-m", "fsdp", "status", path=self.light)
        self.assertEqual((ran.returncode, ran.stdout.strip()), (1, f"not enabled: there is no {written[0]}"))

    def test_the_variable_decides(self):
        is_there = "import sys; print('_fsdp_replace_torch' in sys.modules)"
        self.assertEqual(self.output("-c", is_there, FSDP_REPLACE_TORCH=1).strip(), "False")
        self.enable()
        for value in ({}, {"FSDP_REPLACE_TORCH": "0"}):
            self.assertEqual(self.output("-c", is_there, **value).strip(), "False")
        for value, maker in (("true", OURS), ("", TORCHS)):
            self.assertEqual(self.maker(FSDP_REPLACE_TORCH=value), maker)

    def test_whichever_way_a_program_comes_by_the_name_it_is_ours(self):
        self.enable()
        texts = ("from torch.distributed.fsdp import fully_shard as f, FSDPModule\nfully_shard = f",
                 "import torch.distributed.fsdp as place\nfully_shard = place.fully_shard",
                 "from torch.distributed.fsdp import *",
                 "from torch.distributed.fsdp._fully_shard import fully_shard",
                 "from torch.distributed._composable.fsdp import fully_shard",
                 "from torch.distributed._composable.fsdp.fully_shard import fully_shard",
                 # Which imports torch's module half-way through its own import.
                 "import torch.distributed.checkpoint\nfrom torch.distributed.fsdp import fully_shard",
                 "import torch.distributed.pipelining\nfrom torch.distributed._composable.fsdp import fully_shard",
                 "import fsdp\nfrom torch.distributed.fsdp import fully_shard")
        makers = self.forks([({}, f"{text}\nprint(fully_shard.__module__)") for text in texts], FSDP_REPLACE_TORCH=1)
        self.assertEqual([maker.strip() for maker in makers], [OURS] * len(texts))

    def test_python_starts_without_torch_and_without_the_variable_with_nothing_at_all(self):
        self.enable()
        text = "import sys; print([name for name in ('torch', 'fsdp', '_fsdp_replace_torch') if name in sys.modules])"
        self.assertEqual(self.output("-c", text).strip(), "[]")
        self.assertEqual(self.output("-c", text, FSDP_REPLACE_TORCH=1).strip(), "['_fsdp_replace_torch']")

    def test_what_a_program_starts_has_it_too(self):
        self.enable()
        program = self.write("spawns.py", """
            import multiprocessing
            def child():
                from torch.distributed.fsdp import fully_shard
                print(fully_shard.__module__)
            if __name__ == "__main__":
                process = multiprocessing.get_context("spawn").Process(target=child)
                process.start()
                process.join()
            """)
        self.assertEqual(self.output(program, FSDP_REPLACE_TORCH=1).strip(), OURS)

    def test_without_the_names_fsdp_is_not_imported(self):
        self.enable()
        text = ("import sys, torch.distributed.checkpoint\nfrom torch.distributed.fsdp import FullyShardedDataParallel\n"
                "print('torch.distributed.fsdp' in sys.modules, 'fsdp' in sys.modules)")
        self.assertEqual(self.output("-c", text, FSDP_REPLACE_TORCH=1).strip(), "True False")

    def test_what_cannot_be_replaced_is_an_error_at_every_use_that_no_program_takes_for_an_older_torch(self):
        self.enable()
        text = ("import torch.distributed.fsdp as place, torch\n{}\n"
                "for _ in range(2):\n    try:\n        from torch.distributed.fsdp import fully_shard\n"
                "    except RuntimeError as error:\n        print(error)\n"
                "print(vars(place)['fully_shard'].__module__)")
        cases = (("No module named 'fsdp'", f"import sys; sys.path.remove({str(rank_results.PACKAGE)!r})", "1"),
                 ("expected 0 or 1, found 'maybe'", "", "maybe"),
                 ("but this is torch 2.10.1", "torch.__version__ = '2.10.1'", "1"),
                 ("torch.distributed.fsdp.share_comm_ctx is not torch's own, but <built-in function len>",
                  "place.share_comm_ctx = len", "1"))
        printed = self.forks([({"FSDP_REPLACE_TORCH": value}, text.format(change)) for _, change, value in cases],
                             FSDP_REPLACE_TORCH=1)
        for (says, *_), lines in zip(cases, printed):
            *errors, maker = lines.splitlines()
            self.assertEqual((len(errors), maker), (2, TORCHS), lines)
            for error in errors:
                self.assertIn(says, error)
                self.assertIn("unset the variable to run with torch's own", error)

    def test_the_version_is_told(self):
        self.assertRegex(self.output("-m", "fsdp", "--version", path=self.light), r"^libfsdp \d+\.\d+\.\d+$")

    @unittest.skipIf(os.getuid() == 0, "root may write everywhere")
    def test_a_folder_that_may_not_be_written_to_is_named_as_users_see_it(self):
        self.site.chmod(0o555)
        self.addCleanup(self.site.chmod, 0o755)
        self.expect_light_error(2, [f"{self.site}, where this Python's packages are, cannot be written to", "python -m venv"],
                                "-m", "fsdp", "enable")

    def test_what_cannot_be_written_or_removed_is_named_and_nothing_is_left(self):
        blocked = self.site / "_fsdp_replace_torch.py"
        blocked.mkdir()  # what even root cannot write over
        self.addCleanup(lambda: blocked.exists() and blocked.rmdir())
        self.expect_light_error(2, [f"{self.site}, where this Python's packages are, cannot be written to", "python -m venv",
                                    "which writes nothing"], "-m", "fsdp", "enable")
        self.assertEqual(self.files(), [blocked.name])
        self.assertEqual([file for file in self.site.iterdir() if file.name.startswith(".")], [])
        self.expect_light_error(2, [f"{blocked} cannot be removed", "or unset FSDP_REPLACE_TORCH"], "-m", "fsdp", "disable")


if __name__ == "__main__":
    main()
