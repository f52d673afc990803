"""What tools/gpu_check brings along runs from an empty folder, without a network, a compiler or this machine's packages.

FSDP_BUILD_DIR is packed, for the torch of this python3. test/gpu/rehearse.py is the whole rehearsal.
"""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import unittest
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "tools" / "gpu"), str(HERE.parent / "processes")]

import bare_machine
import elf
import extension
import pack
from call import ALL_PASSED
from closing_line import main
from record import Record

PROGRAMS = (pack.NATIVE, pack.TRAIN)
FAST = 0  # of xz: the archive of this test does not travel


class Packed(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        if not Path("/var/lib/dpkg/status").exists():
            raise unittest.SkipTest("no Debian packages here")
        cls.folder = Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        cls.build = Path(os.environ["FSDP_BUILD_DIR"])
        cls.manifest = pack.pack(cls.folder / "packed", cls.build, sys.executable, PROGRAMS, with_cuda=False, preset=FAST)
        with tarfile.open(cls.folder / "packed" / pack.ARCHIVE) as archive:
            archive.extractall(cls.folder / "opened", filter="data")
        cls.elves = pack.elves(cls.folder / "opened")

    def test_it_has_what_the_parts_run_and_debians_libraries(self):
        names = {str(path.relative_to(self.folder / "opened")) for path in self.elves}
        (extension,) = [name for name in names if name.startswith("bindings/fsdp/_C.")]
        self.assertIn(f"cpython-3{sys.version_info.minor}", extension)
        for name in (*PROGRAMS, "test/gpu/native/libfsdp_test_gpu_device.so"):
            self.assertIn(name, names)
        libraries = {name.split(".so")[0] for name in names if name.startswith("lib/")}
        self.assertEqual(libraries, {"lib/libfsdp", "lib/libfmt", "lib/libspdlog", "lib/libisal"})
        self.assertTrue((self.folder / "opened" / "bindings" / "fsdp" / "_api.py").exists())
        self.assertEqual(self.manifest["files"].keys(), names)

    def test_it_asks_for_no_newer_glibc_than_debian_12_has_and_says_which(self):
        newest = elf.newest_versions(self.elves)["GLIBC"]
        self.assertEqual(self.manifest["glibc"], newest)
        self.assertLessEqual(elf.numbers(newest), (2, 36))

    def test_no_file_knows_where_it_was_built(self):
        for path in self.elves:
            paths = [word for line in elf.read("-d", path).splitlines() if "PATH" in line
                     for word in line.split("[")[1].rstrip("]").split(":")]
            self.assertTrue(paths and all(word.startswith("$ORIGIN/") for word in paths), f"{path.name}: {paths}")

    def test_it_says_how_to_compile_the_extension_alone_with_words_for_what_is_elsewhere_there(self):
        flags = self.manifest["extension"]
        self.assertEqual([flag for flag in flags if "/" in flag and not flag.removeprefix("-I").startswith("{")], [])
        self.assertTrue({"-I{source}/include", "-I{build}/include", "{torch}/include", "-std=c++20"} <= set(flags), flags)
        self.assertTrue((self.folder / "opened" / "include" / "fsdp" / "version.hpp").exists())
        self.assertGreater(len(extension.sources()), 30)
        self.assertTrue(all(path.exists() for path in extension.sources()))

    def test_a_build_that_lacks_a_program_and_a_folder_with_something_else_are_refused(self):
        with self.assertRaisesRegex(pack.PackError, "lacks test/none; build them first"):
            pack.pack(self.folder / "other", self.build, sys.executable, ("test/none",))
        (self.folder / "full").mkdir()
        (self.folder / "full" / "mine").write_text("")
        with self.assertRaisesRegex(pack.PackError, "has something else in it"):
            pack.pack(self.folder / "full", self.build, sys.executable, PROGRAMS)

    def ask(self, *arguments):
        return subprocess.run([sys.executable, self.folder / "opened" / pack.HEADERS / "bin" / "pkg-config", *arguments],
                              capture_output=True, text=True)

    def test_its_headers_are_known_to_a_build_on_a_machine_that_the_binaries_do_not_fit(self):
        flags = self.ask("--cflags", "spdlog").stdout.split()
        self.assertIn("-DSPDLOG_COMPILED_LIB", flags)
        self.assertTrue(Path(flags[0].removeprefix("-I"), "spdlog", "spdlog.h").exists())
        words = self.ask("--libs", "libisal").stdout.split()
        self.assertTrue(Path(words[0].removeprefix("-L"), "libisal.so").exists())
        self.assertRegex(self.ask("--modversion", "fmt").stdout, r"^\d+\.\d+")
        self.assertEqual(self.ask("--modversion", "zlib").returncode, 1)

    def test_it_runs_in_an_empty_folder_without_network_compiler_and_packages(self):
        if shutil.which("git") is None:
            self.skipTest("no git here, which lists what travels")
        machine = self.folder / "machine"
        bare_machine.make(machine, self.folder / "packed")
        with open(self.folder / "said", "w+") as said:
            code = bare_machine.call(machine, sys.executable, [
                "first", "--device", "cpu", "--slower", 8, "--part", "libraries,two_ranks,native_one",
                "--copy", machine / "back"], said)
            said.seek(0)
            text = said.read()
        self.assertEqual(code, ALL_PASSED, text)
        self.assertTrue(text.startswith("plan of first: at most 2400 s"), text)
        self.assertNotIn("do not fit", text)
        record = Record(machine / "repository" / ".cache" / "gpu_check" / "cpu")
        (here,) = [line["found"] for line in record.lines("first") if line.get("found", {}).get("figure") == "what is here"]
        self.assertEqual([here["fsdp_test_gpu"], here["fsdp_train"]], ["starts", "starts"])
        self.assertTrue(here["package"].startswith(str(machine)), here)
        self.assertGreater(record.last("first", "native_one")["counts"][0], 3)
        machine_line = [line for line in record.lines("machine")][-1]
        self.assertEqual(machine_line["compiler"], "")
        self.assertEqual(sorted(path.name for path in (machine / "back").iterdir()), ["log.txt", "report.md", "results.jsonl"])
        for line in (machine / "back" / "results.jsonl").read_text().splitlines():
            json.loads(line)
        report = (machine / "back" / "report.md").read_text()
        self.assertIn("run with this torch | rehearsed |", report)
        self.assertIn("| not reached | second/steps |", report)


if __name__ == "__main__":
    main()
