"""The library as a user finds it: from the build folder or installed, by pkg-config or by CMake.

Each test compiles a program in a folder outside the tree and runs it.
"""

import importlib.util
import json
import os
import re
import shutil
import sys
import tempfile
import unittest
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "processes"))
from closing_line import main  # noqa: E402
from commands import run  # noqa: E402

BUILD = Path(os.environ["FSDP_BUILD_DIR"])


class Package(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = Path(tempfile.mkdtemp(prefix="fsdp-package-"))
        cls.addClassCleanup(shutil.rmtree, cls.folder)
        cls.stage = cls.folder / "stage"
        meson = [sys.executable, "-m", "mesonbuild.mesonmain"]
        run(*meson, "install", "-C", BUILD, "--no-rebuild", "--destdir", cls.stage)
        (found,) = cls.stage.rglob("fsdp.pc")
        cls.installed_pc = found
        (found,) = cls.stage.rglob("fsdp-config.cmake")
        cls.installed_cmake = found.parent

    def pkg_config(self, *arguments, installed):
        if not installed:
            return run("pkg-config", *arguments, "fsdp",
                       environment={"PKG_CONFIG_PATH": str(BUILD / "tools" / "packaging" / "uninstalled")}).split()
        # As if the library had been configured for the stage.
        (prefix,) = re.findall("^prefix=(.*)$", self.installed_pc.read_text(), re.MULTILINE)
        return run("pkg-config", f"--define-variable=prefix={self.stage}{prefix}", *arguments, "fsdp",
                   environment={"PKG_CONFIG_PATH": str(self.installed_pc.parent)}).split()

    def build_with_pkg_config(self, source, installed=False):
        program = self.folder / f"pkg_config_{source.stem}"
        run("g++", "-std=c++20", source, *self.pkg_config("--cflags", installed=installed), "-o", program,
            *self.pkg_config("--libs", installed=installed))
        return program

    def build_with_cmake(self, source, config, *options):
        folder = Path(tempfile.mkdtemp(prefix="cmake_", dir=self.folder))
        run("cmake", "-S", HERE, "-B", folder, f"-Dfsdp_DIR={config}", f"-DPROGRAM={source}", *options)
        run("cmake", "--build", folder)
        return folder / "program"

    def test_pkg_config_finds_the_build_folder(self):
        self.assertIn("a world of 1", run(self.build_with_pkg_config(HERE / "small.cpp")))

    def test_cmake_finds_the_installed_library_and_the_program_trains(self):
        output = run(self.build_with_cmake(HERE / "train_lstm.cpp", self.installed_cmake))
        for ranks in ("one rank", "two ranks"):
            self.assertIn(f"{ranks}: the losses and 6 weights equal the plain model's", output)

    def test_pkg_config_finds_the_installed_library_and_says_the_version_of_its_headers_and_of_itself(self):
        program = self.build_with_pkg_config(HERE / "small.cpp", installed=True)
        # The stage is no folder that the loader knows.
        libraries = str(next(self.stage.rglob("libfsdp.so")).parent)
        (version,) = self.pkg_config("--modversion", installed=True)
        self.assertEqual(run(program, environment={"LD_LIBRARY_PATH": libraries}),
                         f"a world of 1, by libfsdp {version} with the headers of {version}\n")

    def test_cmake_finds_the_build_folder(self):
        program = self.build_with_cmake(HERE / "small.cpp", BUILD / "tools" / "packaging" / "uninstalled")
        self.assertIn("a world of 1", run(program))

    def test_cmake_takes_it_beside_torchs_own_package(self):
        torch = Path(importlib.util.find_spec("torch").origin).parent
        # Torch's package of a CUDA build asks for a toolkit with a compiler.
        has_compiler = shutil.which("nvcc") or Path("/usr/local/cuda/bin/nvcc").exists()
        if (torch / "lib" / "libtorch_cuda.so").exists() and not has_compiler:
            self.skipTest("no nvcc for torch's own CMake package")
        # Torch's package lets the linker take the toolkit's NCCL, which may be older than torch's.
        nccl = torch.parent / "nvidia" / "nccl" / "lib"
        program = self.build_with_cmake(HERE / "small.cpp", self.installed_cmake, "-DBESIDE_TORCH=ON",
                                        f"-DCMAKE_PREFIX_PATH={torch}", f"-DCMAKE_EXE_LINKER_FLAGS=-Wl,-rpath-link,{nccl}")
        self.assertIn("a world of 1", run(program))

    def test_only_public_headers_are_installed(self):
        installed = {path.name for path in self.stage.rglob("*.hpp")}
        public = {path.name.removesuffix(".in") for path in (HERE.parents[1] / "include" / "fsdp").rglob("*.hpp*")}
        self.assertEqual(installed, public)

    def command(self, name):
        found = [path for path in self.stage.rglob(name) if path.parent.name == "bin"]
        if not found:
            self.skipTest(f"no {name}: the bindings are not built")
        self.assertEqual(run(found[0], "--version"), f"libfsdp {' '.join(self.pkg_config('--modversion', installed=True))}\n")
        return found[0]

    def test_the_command_for_checkpoints_is_installed(self):
        command, file = self.command("fsdp-checkpoint"), self.folder / "a.safetensors"
        header = json.dumps({"weight": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
        file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
        self.assertRegex(run(command, "list", file), r"weight +float32 +2 +8 +a\.safetensors")

    def test_the_command_for_timelines_is_installed_and_needs_no_package(self):
        command, trace = self.command("fsdp-timeline"), self.folder / "trace.json"
        phases = [{"ph": "X", "pid": 0, "cat": "phase", "name": name, "ts": begin, "dur": 5}
                  for name, begin in (("forward", 0), ("backward", 5))]
        trace.write_text(json.dumps({"traceEvents": phases}))
        # matplotlib is this Python's.
        self.assertEqual(run(sys.executable, command, trace), f"{trace.with_suffix('.svg')}\n")
        self.assertIn("<svg", trace.with_suffix(".svg").read_text())


if __name__ == "__main__":
    main()
