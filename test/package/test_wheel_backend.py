"""What a build of the wheel asks pip for, and what the wheel then requires; nothing is compiled."""

import sys
import tempfile
import tomllib
import unittest
from pathlib import Path
from unittest import mock

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE.parent / "processes"), str(ROOT / "tools" / "packaging")]
import packaging.version  # noqa: E402
import wheel_backend  # noqa: E402
from closing_line import main  # noqa: E402


class Backend(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="fsdp-backend-")
        self.addCleanup(folder.cleanup)
        self.site = Path(folder.name)
        for patch in (mock.patch.object(wheel_backend, "ENVIRONMENT", folder.name), mock.patch.object(sys, "path", []),
                      mock.patch.object(wheel_backend.Metadata, "requirement", wheel_backend.SUPPORTED)):
            patch.start()
            self.addCleanup(patch.stop)

    def install(self, **versions):
        for name, version in versions.items():
            folder = self.site / f"{name}-{version}.dist-info"
            folder.mkdir()
            (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

    def asked_for(self):
        with mock.patch.object(wheel_backend.mesonpy, "get_requires_for_build_wheel", return_value=[]):
            return wheel_backend.get_requires_for_build_wheel()

    def metadata(self):
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())
        metadata = wheel_backend.Metadata.from_pyproject(project, ROOT)
        metadata.version = packaging.version.Version("0.1.0")
        return metadata.as_rfc822()

    def test_without_a_torch_a_build_asks_for_one(self):
        self.assertEqual(self.asked_for(), ["torch>=2.11,<2.16", "cuda-toolkit[cccl,crt]"])

    def test_for_the_environments_torch_it_asks_for_the_headers_alone_that_torch_lacks(self):
        self.install(torch="2.15.0", cuda_toolkit="13.2.2")
        self.assertEqual(self.asked_for(), ["cuda-toolkit[cccl,crt]==13.2.2"])

    def test_those_of_CUDA_12_are_in_other_wheels(self):
        self.install(torch="2.11.0+cu128", cuda_toolkit="12.8.1")
        self.assertEqual(self.asked_for(), ["cuda-toolkit[cccl,nvcc]==12.8.1"])

    def test_a_torch_without_CUDA_needs_none(self):
        self.install(torch="2.15.0+cpu")
        self.assertEqual(self.asked_for(), [])

    def test_a_wheel_requires_the_minor_version_that_it_is_for(self):
        self.install(torch="2.13.1+cu130")
        wheel_backend.require_torch_of_the_build()
        metadata = self.metadata()
        self.assertEqual(metadata.get_all("Requires-Dist"), ["torch<2.14,>=2.13"])
        self.assertIsNone(metadata["Dynamic"])

    def test_the_sources_are_for_each_that_is_supported_and_say_that_a_wheel_requires_less(self):
        metadata = self.metadata()
        self.assertEqual(metadata.get_all("Requires-Dist"), ["torch<2.16,>=2.11"])
        self.assertEqual(metadata["Dynamic"].lower(), "requires-dist")


if __name__ == "__main__":
    main()
