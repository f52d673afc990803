"""CUDA's and NCCL's headers among torch's wheels, in folders laid out as those of CUDA 12 and 13; and what the build says
where they are not."""

import os
import sys
import tempfile
import unittest
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE.parent / "processes"), str(ROOT / "lib" / "torch")]
import cuda_headers  # noqa: E402
from closing_line import main  # noqa: E402
from commands import run  # noqa: E402

NCCL_HEADER = "#define NCCL_MAJOR 2\n#define NCCL_MINOR 28\n#define NCCL_PATCH 9\n"
WHEELS_12 = {"cuda_runtime": "cuda_runtime_api.h", "cuda_nvcc": "crt/host_config.h", "cuda_cccl": "nv/target",
             "cublas": "cublas_v2.h", "cusparse": "cusparse.h", "cusolver": "cusolverDn.h", "nccl": "nccl.h"}
TORCH = """
__version__ = "2.15.0+cu128"
class version: cuda = "12.8"
class _C: _GLIBCXX_USE_CXX11_ABI = True
class cuda:
    class nccl: version = staticmethod(lambda: (2, 28, 9))
"""


class Folders(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="fsdp-headers-")
        self.addCleanup(folder.cleanup)
        self.site, self.toolkit = Path(folder.name, "site"), Path(folder.name, "toolkit")
        self.site.mkdir()

    def add(self, folder, *headers):
        for header in headers:
            path = self.site / "nvidia" / folder / "include" / header
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(NCCL_HEADER if header == "nccl.h" else "")

    def add_cuda_12(self, without=()):
        for folder, header in WHEELS_12.items():
            if folder not in without:
                self.add(folder, header)

    def found(self, major):
        folders = cuda_headers.folders([self.site], major, self.toolkit)
        return [folder.parent.name for folder in folders], cuda_headers.missing(folders, major)

    def test_each_wheel_of_cuda_12_has_a_folder(self):
        self.add_cuda_12()
        self.assertEqual(self.found(12), (list(WHEELS_12), []))

    def test_the_wheels_of_cuda_13_share_one(self):
        self.add("cu13", *cuda_headers.TOOLKIT)
        self.add("nccl", "nccl.h")
        self.assertEqual(self.found(13), (["cu13", "nccl"], []))

    def test_those_of_another_version_are_not_taken(self):
        self.add("cu13", *cuda_headers.TOOLKIT)
        self.add_cuda_12(without=["cuda_runtime"])
        self.assertEqual(self.found(12)[1], ["cuda-toolkit[cudart]"])
        self.assertEqual(self.found(13), (["cu13", "nccl"], []))

    def test_what_is_missing_is_named_as_pip_installs_it(self):
        self.add_cuda_12(without=["cuda_nvcc", "cuda_cccl", "nccl"])
        self.assertEqual(self.found(12)[1], ["cuda-toolkit[nvcc,cccl]", "nvidia-nccl-cu12"])
        self.add("cu13", *set(cuda_headers.TOOLKIT) - {"crt/host_config.h"})
        self.assertEqual(self.found(13)[1], ["cuda-toolkit[crt]", "nvidia-nccl-cu13"])

    def test_what_is_missing_is_taken_from_a_toolkit_of_the_same_version(self):
        (self.toolkit / "include" / "crt").mkdir(parents=True)
        (self.toolkit / "include" / "crt" / "host_config.h").touch()
        (self.toolkit / "include" / "cuda.h").write_text("#define CUDA_VERSION 12080\n")
        self.add("cu13", *set(cuda_headers.TOOLKIT) - {"crt/host_config.h"})
        self.add_cuda_12(without=["cuda_nvcc"])
        without = [folder for folder in WHEELS_12 if folder != "cuda_nvcc"]
        self.assertEqual(self.found(12), ([*without, "toolkit"], []))
        self.assertEqual(self.found(13), (["cu13", "nccl"], ["cuda-toolkit[crt]"]))
        self.add_cuda_12()
        self.assertEqual(self.found(12), (list(WHEELS_12), []))

    def configure(self, *options, fails=False):
        """What Meson prints with a torch for CUDA 12 that is nothing but its versions."""
        (self.site / "torch.py").write_text(TORCH)
        return run(sys.executable, "-m", "mesonbuild.mesonmain", "setup", self.site / "build", ROOT,
                   f"-Dpython={sys.executable}", "-Dtests=disabled", "-Dbench=disabled", "-Dtools=disabled",
                   "-Dbindings=disabled", *options, fails=fails, environment={"PYTHONPATH": str(self.site)})

    def test_the_build_takes_those_of_cuda_12(self):
        self.add_cuda_12()
        self.assertRegex(self.configure("-Dcuda=enabled"), r"NCCL +: 2\.28\.9")
        commands = (self.site / "build" / "compile_commands.json").read_text()
        for folder in WHEELS_12:
            self.assertIn(str(self.site / "nvidia" / folder / "include"), commands)

    @unittest.skipIf(cuda_headers.toolkit_major(Path("/usr/local/cuda")) == 12, "this machine has them")
    def test_the_build_says_in_capitals_that_cuda_is_off(self):
        self.add_cuda_12(without=["cuda_cccl"])
        self.assertIn('CUDA IS OFF: torch 2.15.0 is built for CUDA 12.8, of which headers are missing; '
                      'pip install "cuda-toolkit[cccl]"', self.configure().replace("\n", " "))
        self.assertIn("cuda-toolkit[cccl]", self.configure("-Dcuda=enabled", "--wipe", fails=True))
        self.assertNotIn("CUDA IS OFF", self.configure("-Dcuda=disabled", "--wipe"))


if __name__ == "__main__":
    main()
