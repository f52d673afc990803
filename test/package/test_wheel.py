"""The Python package as pip installs it: the wheel of tools/wheel, used from a folder outside the tree, and editable.

Compiles the library once more, which takes minutes: only with FSDP_TEST_WHEEL=1.
"""

import importlib.metadata
import os
import re
import shutil
import sys
import sysconfig
import tempfile
import unittest
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE.parent / "processes"))
import quickstarts  # noqa: E402
from closing_line import main  # noqa: E402
from commands import run  # noqa: E402

# In the tree: a second time only compiles what has changed. Not that of tools/wheel, as what meson-python puts in a wheel does
# not find its libraries in the build folder any more.
BUILD = ROOT / "build-editable"

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
        torch = importlib.metadata.version("torch").split("+")[0]
        cls.run_command(ROOT / "tools" / "wheel", "--torch", torch, "--output", cls.folder)
        (cls.wheel,) = cls.folder.glob("*.whl")
        cls.pip("install", "--no-deps", "--target", cls.folder / "site", cls.wheel)

    def test_it_is_for_this_python_and_for_systems_as_old_as_its_compiler_allows(self):
        python = f"cp{sys.version_info.major}{sys.version_info.minor}"
        self.assertRegex(self.wheel.name, rf"-{python}-{python}-manylinux_2_\d+_x86_64\.whl$")

    def test_it_requires_the_minor_version_of_torch_that_it_is_for(self):
        minor = int(importlib.metadata.version("torch").split(".")[1])
        with zipfile.ZipFile(self.wheel) as wheel:
            (metadata,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
            self.assertIn(f"\nRequires-Dist: torch<2.{minor + 1},>=2.{minor}\n", wheel.read(metadata).decode())

    def test_its_libraries_need_nothing_but_torchs_cudas_and_the_systems(self):
        site = self.folder / "site"
        libraries = {path.name: self.run_command("readelf", "--dynamic", "--wide", path)
                     for path in site.rglob("*.so*") if path.is_file()}
        needed = {name for text in libraries.values() for name in re.findall(r"\(NEEDED\).*\[(.*)\]", text)}
        allowed = re.compile(r"libtorch|libc10|libstdc\+\+\.so\.6|libgcc_s\.so\.1|libc\.so\.6|libm\.so\.6|ld-linux-")
        self.assertEqual({name for name in needed - libraries.keys() if not allowed.match(name)}, set())
        self.assertNotIn(str(ROOT), "".join(libraries.values()))

    def test_nothing_of_what_it_brings_of_others_is_visible(self):
        for name in ("libfsdp.so", "_C.*.so"):
            (library,) = (self.folder / "site").rglob(name)
            symbols = self.run_command("nm", "--dynamic", "--defined-only", library)
            self.assertIn(" T ", symbols)
            self.assertEqual(re.findall(r".*(?:3fmt2v|6spdlog|8nlohmann|crc32_iscsi).*", symbols), [])

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
        self.assertIn("fsdp/licences/libisal-dev", listed)
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
        cls.pip("install", "--no-build-isolation", "--no-deps", f"-Cbuild-dir={BUILD}", "--editable", ROOT)

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
