"""The Python package as pip installs it: a wheel for this torch, used from a folder outside the tree, and editable.

Compiles the library once more, which takes minutes: only with FSDP_TEST_WHEEL=1.
"""

import os
import shutil
import sys
import sysconfig
import tempfile
import unittest
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE.parent / "processes"))
import quickstarts  # noqa: E402
from closing_line import main  # noqa: E402
from commands import run  # noqa: E402

BUILD = ROOT / "build-wheel"  # in the tree, for both: a second time only compiles what has changed

PROGRAM = """
import os, sys
import torch, torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from fsdp import fully_shard

torch.distributed.init_process_group("gloo")
ranks = torch.distributed.get_world_size()
mesh = init_device_mesh("cpu", (ranks,))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
for layer in (model[0], model[2]):
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
torch.manual_seed(torch.distributed.get_rank())
x = torch.randn(64, 4)
losses = []
for step in range(30):
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
torch.distributed.destroy_process_group()
assert losses[-1] < losses[0] / 3, losses
print("trained", flush=True)
"""


NEEDS_MINUTES = unittest.skipUnless(os.environ.get("FSDP_TEST_WHEEL") == "1",
                                    "compiles for minutes; FSDP_TEST_WHEEL=1 runs it")


class Installed(unittest.TestCase):
    """What holds for either way of installing; `python` is what sees the package."""

    python = Path(sys.executable)

    @classmethod
    def setUpClass(cls):
        cls.folder = Path(tempfile.mkdtemp(prefix="fsdp-wheel-"))
        cls.addClassCleanup(shutil.rmtree, cls.folder)

    @classmethod
    def pip(cls, *command):
        return cls.run_command(cls.python, "-m", "pip", "--disable-pip-version-check", *command)

    @classmethod
    def run_command(cls, *command, fails=False):
        # What the environment has besides Python (ninja, meson) is on its path.
        environment = {"PYTHONPATH": str(cls.folder / "site"), "OMP_NUM_THREADS": "1",
                       "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                       "CCACHE_SLOPPINESS": "pch_defines,time_macros"}
        return run(*command, environment=environment, fails=fails, cwd=cls.folder)

    def expect_training(self):
        program = self.folder / "program.py"
        program.write_text(PROGRAM)
        output = self.run_command(self.python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
                                  program)
        self.assertEqual(output.count("trained"), 2, output)


@NEEDS_MINUTES
class Wheel(Installed):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.pip("wheel", "--no-build-isolation", "--no-deps", f"-Cbuild-dir={BUILD}", "--wheel-dir", cls.folder, ROOT)
        (cls.wheel,) = cls.folder.glob("*.whl")
        cls.pip("install", "--no-deps", "--target", cls.folder / "site", cls.wheel)

    def test_it_is_for_this_python_and_machine(self):
        self.assertIn(f"cp{sys.version_info.major}{sys.version_info.minor}", self.wheel.name)

    def test_two_ranks_train(self):
        self.expect_training()

    def test_the_program_of_the_quick_start_trains(self):
        program = self.folder / "train.py"
        program.write_text(quickstarts.python_program())
        output = self.run_command(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
                                  "2", program)
        for losses in quickstarts.losses(output).values():
            self.assertLess(sum(losses[-5:]) / 5, 0.75 * losses[0])

    def test_another_torch_is_refused_by_name(self):
        output = self.run_command(sys.executable, "-c", "import torch; torch.__version__ = '2.10.1'; import fsdp",
                                  fails=True)
        self.assertIn("ImportError: fsdp was built with torch", output)
        self.assertIn("2.10.1", output)

    def test_its_commands_are_installed(self):
        for name in ("fsdp-checkpoint", "fsdp-timeline"):
            self.assertRegex(self.run_command(self.folder / "site" / "bin" / name, "--version"), r"^libfsdp \d+\.\d+\.\d+$")

    def test_it_holds_the_library_and_nothing_of_the_build_folder(self):
        listed = self.run_command(sys.executable, "-m", "zipfile", "-l", self.wheel)
        self.assertIn("libfsdp.so", listed)
        self.assertIn("fsdp/py.typed", listed)
        self.assertIn("fsdp/_C.pyi", listed)
        for name in ("fsdp_train", "test_", ".hpp"):
            self.assertNotIn(name, listed)


@NEEDS_MINUTES
class Editable(Installed):
    """In an environment of its own, which sees this one's packages: the tree's files are the package's."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.run_command(sys.executable, "-m", "venv", cls.folder / "env")
        cls.python = cls.folder / "env" / "bin" / "python"
        places = cls.run_command(cls.python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
        Path(places, "torch.pth").write_text(sysconfig.get_path("purelib") + "\n")
        cls.pip("install", "--no-build-isolation", "--no-deps", f"-Cbuild-dir={BUILD}", "--editable",
                ROOT)

    def test_the_package_is_the_tree(self):
        output = self.run_command(self.python, "-c", "import fsdp, fsdp._C\n"
                                  "print(fsdp._fully_shard.__file__)\nprint(fsdp._C.__file__)")
        source, extension = output.split()[-2:]
        self.assertEqual(Path(source), ROOT / "bindings" / "fsdp" / "_fully_shard.py")
        self.assertFalse(Path(extension).is_relative_to(self.folder), extension)

    def test_two_ranks_train(self):
        self.expect_training()


if __name__ == "__main__":
    main()
